"""Which releases of torch are supported, and which were tested. Loads no torch: `doctor` may find none."""

from __future__ import annotations

OLDEST, NEWEST = (2, 11), (2, 15)
"""The range of pyproject.toml, as (major, minor)."""

TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Releases on which the main cases were run and compared."""

SUPPORTED = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"


def is_supported(version: str) -> bool:
    """Whether `2.13.0+cpu` is in the range; what is no version is not."""
    try:
        major, minor = map(int, version.split(".")[:2])
    except ValueError:
        return False
    return OLDEST <= (major, minor) <= NEWEST


def is_tested(version: str) -> bool:
    """Whether `2.13.0+cpu` is one of the tested releases, however it was built."""
    return version.partition("+")[0] in TESTED
