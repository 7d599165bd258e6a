"""Settings of NCCL before it starts, for a fixed order of a rank's sums and launches. Imports no torch.

Variables that are already set stay; manifests have the values of the rank's process.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from collections.abc import MutableMapping

LAUNCH_ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
"""Communicators that are in flight on several streams at once run in the order of their launches, as two that each
wait for the other's GPU never end. Since NCCL 2.26; a graph's launches are in one order on all ranks."""

OWN_SUMS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
"""One algorithm and one protocol for every size, and no sums in the switch, whose order is not repeatable."""


def allow_shared_gpu(environment: MutableMapping[str, str], rank: int) -> None:
    """Let this rank's NCCL use a GPU that another rank has, too: two of one host are refused, so each has its own."""
    environment["NCCL_HOSTID"] = f"bitproof-rank{rank}"


def pin_nccl(environment: MutableMapping[str, str], *, native: bool) -> None:
    """Set what NCCL reads when it starts; with `native` sums are its own."""
    for name, value in (LAUNCH_ORDER | (OWN_SUMS if native else {})).items():
        environment.setdefault(name, value)
