"""List the supported and tested releases of torch. Loads no torch: `doctor` may find none."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

OLDEST, NEWEST = (2, 11), (2, 15)
"""The oldest release that pyproject.toml allows, and the newest that was tested, as (major, minor)."""

TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Releases on which the main cases were run and compared."""

SUPPORTED = f"{'.'.join(map(str, OLDEST))} or later"
COVERED = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"


def is_supported(version: str) -> bool:
    """Whether a version such as `2.13.0+cpu` is not too old; a newer release, such as a nightly, runs with a warning.
    False for an invalid version."""
    return _minor_of(version) >= OLDEST


def is_covered(version: str) -> bool:
    """Whether a version such as `2.13.0+cpu` is within the range of tested releases, whose operators are known."""
    return OLDEST <= _minor_of(version) <= NEWEST


def is_tested(version: str) -> bool:
    """Whether a version such as `2.13.0+cpu` is a tested release, for any build."""
    return version.partition("+")[0] in TESTED


def warning_of(version: object) -> str | None:
    """A warning for readers about an untested torch; None for a tested release, or without torch."""
    if not isinstance(version, str) or is_tested(version):
        return None
    return f"torch {version} is not among the tested versions ({', '.join(TESTED)})"


def _minor_of(version: str) -> tuple[int, int]:
    """(2, 13) for `2.13.0+cpu`; (0, 0) for an invalid version."""
    try:
        major, minor = map(int, version.split(".")[:2])
    except ValueError:
        return 0, 0
    return major, minor


def torch_version() -> str | None:
    """torch's own version, such as `2.15.0+cu132`, since the metadata of a wheel from PyPI lacks the build."""
    spec = importlib.util.find_spec("torch")  # finds the package without loading it
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__ = ['\"](.+)['\"]$", text, re.MULTILINE)
    return found[1] if found else None
