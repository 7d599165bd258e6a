"""The memory that this machine has left. Loads no torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Return the available bytes for runs: the machine's, limited by its container; None if unknown."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(told["MemAvailable"].split()[0]) << 10)
    with suppress(OSError, ValueError, KeyError):
        most, now = ((CONTROL_GROUPS / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        # The kernel counts its file cache as used, and frees it on demand.
        cached = dict(line.split() for line in (CONTROL_GROUPS / "memory.stat").read_text().splitlines())["file"]
        found += [int(most) - int(now) + int(cached)] if most != "max" else []
    return min(found, default=None)
