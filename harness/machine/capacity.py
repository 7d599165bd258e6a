"""Computes how many runs fit on the machine at once, by cores and memory. Loads no torch.

Each rank of concurrent runs must have a core of its own and the memory that it is known to need.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

HOST_BYTES = 400 << 20
"""Memory of a host process with its stages: 231 MiB for moe_seq while its ranks run, more while it traces."""
RANK_BYTES = 100 << 20
"""A rank's unshared memory: 53 to 59 MiB for each of moe_seq's eight. A user's system may need any amount."""

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def cores_for_runs() -> int:
    """The number of cores that the runs of this process may use, limited by its affinity and its container's quota.

    Workers of pytest-xdist share the cores equally.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        # For example `200000 100000`: 200 ms of CPU time in each 100 ms, so two cores.
        quota, period = (CONTROL_GROUPS / "cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period)) if quota != "max" else cores
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    return max(1, cores // int(workers) if workers.isdecimal() and int(workers) else cores)


def free_memory() -> int | None:
    """The bytes of memory that runs may use: those available on the machine or in its container; None if unknown."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        # The kernel states KiB.
        found.append(int(meminfo["MemAvailable"].split()[0]) << 10)
    with suppress(OSError, ValueError, KeyError):
        most, now = ((CONTROL_GROUPS / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        # The kernel counts its file cache as used, and frees it on demand.
        cached = dict(line.split() for line in (CONTROL_GROUPS / "memory.stat").read_text().splitlines())["file"]
        found += [int(most) - int(now) + int(cached)] if most != "max" else []
    return min(found, default=None)


def num_at_once(num_ranks: int, cores: int, memory: int | None) -> int:
    """The number of runs that have enough cores and memory, each with a host process and `num_ranks` ranks; at least
    1."""
    return num_in_memory(num_ranks, memory, most=cores // num_ranks)


def num_in_memory(num_ranks: int, memory: int | None, most: int) -> int:
    """The number of runs that fit into memory, each with a host process and `num_ranks` ranks: at least 1, at most
    `most`."""
    fit = most if memory is None else min(most, memory // (HOST_BYTES + num_ranks * RANK_BYTES))
    return max(1, fit)
