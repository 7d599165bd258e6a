"""The memory that this machine has free. Loads no torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Return the bytes of memory that runs may use, on the machine or in its container; None if unknown."""
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
