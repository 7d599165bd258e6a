"""Sets NCCL's environment variables before NCCL starts, for a fixed order of additions and launches. Imports no torch.

Variables that are already set keep their values. Manifests record the values in the rank's process.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from collections.abc import MutableMapping

LAUNCH_ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
"""Communicators that are active on several streams run in the order of their launches.

Without this order, two of them can wait for each other's GPU forever. Since NCCL 2.26. A graph's launches have the same
order on all ranks.
"""

OWN_SUMS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
"""The same algorithm and protocol for every size, and no additions in the NVLink switch, whose order is not
repeatable."""


def allow_shared_gpu(environment: MutableMapping[str, str], rank: int) -> None:
    """Let NCCL run two ranks on one GPU: give each rank a host id of its own.

    NCCL refuses to share a GPU between ranks of the same host.
    """
    environment["NCCL_HOSTID"] = f"bitproof-rank{rank}"


def pin_nccl(environment: MutableMapping[str, str], *, native: bool) -> None:
    """Set the variables that fix the order of launches. With `native`, also fix the order in which NCCL adds."""
    for name, value in (LAUNCH_ORDER | (OWN_SUMS if native else {})).items():
        environment.setdefault(name, value)
