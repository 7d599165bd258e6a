"""Lists the supported and tested releases of torch. Does not import torch, which may not be installed."""

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
    # An invalid version is (0, 0), thus unsupported.
    return _minor_of(version) >= OLDEST


def is_covered(version: str) -> bool:
    """Return whether a version such as `2.13.0+cpu` is between the oldest supported and the newest tested release."""
    return OLDEST <= _minor_of(version) <= NEWEST


def is_tested(version: str) -> bool:
    """Return whether a version such as `2.13.0+cpu` is a tested release, whatever its build (`+cpu`)."""
    return version.partition("+")[0] in TESTED


def warning_of(version: object) -> str | None:
    """Return a warning if this version of torch is untested; None if it is tested, or if `version` is not a string."""
    if not isinstance(version, str) or is_tested(version):
        return None
    return f"torch {version} is not among the tested versions ({', '.join(TESTED)})"


def _minor_of(version: str) -> tuple[int, int]:
    """Return the major and minor version: (2, 13) for `2.13.0+cpu`, and (0, 0) for an invalid version."""
    try:
        major, minor = map(int, version.split(".")[:2])
    except ValueError:
        return 0, 0
    return major, minor


def torch_version() -> str | None:
    """Return the installed version of torch, such as `2.15.0+cu132`; None if it is not installed.

    Does not import torch.
    """
    spec = importlib.util.find_spec("torch")  # finds the package without loading it
    if spec is None or spec.origin is None:
        return None
    try:
        # Read as text, since an import would load torch.
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__ = ['\"](.+)['\"]$", text, re.MULTILINE)
    return found[1] if found else None
