"""Versions and hardware, as far as they can be read without torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from harness import __version__

_PACKAGES = ("torch", "numpy", "triton", "xxhash", "pyarrow")


def describe_machine() -> dict[str, Any]:
    """What the report and every manifest say of the machine. GPUs are named by the driver's own list."""
    return {
        "bitproof": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_versions(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "gpu_models": _gpu_models(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu_models() -> list[str]:
    folder = Path("/proc/driver/nvidia/gpus")
    models = []
    for path in sorted(folder.glob("*/information")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return models
