"""Installed distributions that are only metadata, for tests of entry points."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, entry_points: str) -> None:
    """Put a distribution of version 1.0 into a folder of sys.path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
