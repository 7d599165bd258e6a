"""Sets NCCL's environment variables before it starts, for a fixed order of sums and launches. Imports no torch.

Variables that are already set stay as they are; manifests have the values in the rank's process.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from collections.abc import MutableMapping

LAUNCH_ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
"""Communicators that are active on several streams at once run in the order of their launches. Without an order two of
them can each wait for the other's GPU forever. Since NCCL 2.26; a graph's launches have the same order on all ranks."""

OWN_SUMS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
"""A single algorithm and protocol for every size, and no sums in the NVLink switch, as their order is not
repeatable."""


def allow_shared_gpu(environment: MutableMapping[str, str], rank: int) -> None:
    """Let NCCL run two ranks on one GPU. It refuses this for ranks of one host, so each rank gets its own host id."""
    environment["NCCL_HOSTID"] = f"bitproof-rank{rank}"


def pin_nccl(environment: MutableMapping[str, str], *, native: bool) -> None:
    """Set the variables that NCCL reads when it starts. With `native`, also set those that fix the order of NCCL's own
    sums."""
    for name, value in (LAUNCH_ORDER | (OWN_SUMS if native else {})).items():
        environment.setdefault(name, value)
