"""Describes this machine: versions and hardware, as far as they can be read without torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from bitproof.harness import __version__
from bitproof.harness.processes.command import CommandError, run_command
from bitproof.harness.records import MachineFacts
from bitproof.harness.torch_versions import torch_version

_GIT_SECONDS = 10.0
_PACKAGES = ("torch", "numpy", "triton", "xxhash", "pyarrow")


def describe_machine() -> MachineFacts:
    return {
        "bitproof": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_versions(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "gpu_models": gpu_models(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if built := torch_version():
        versions["torch"] = built
    return versions


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # On Arm, the file has no such line.
    return names[0] if names else platform.processor()


def gpu_models() -> list[str]:
    """Return the model names of the GPUs, from the driver's list: ["NVIDIA H100 80GB HBM3"]. Empty without GPUs."""
    folder = Path("/proc/driver/nvidia/gpus")
    models = []
    # Sorted, since a folder's entries have no fixed order: a path contains the GPU's bus address.
    for path in sorted(folder.glob("*/information")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return models


def commit() -> str | None:
    """Return the git commit of the working directory, with "-dirty" if a file has changed since; None outside of
    git."""
    # Excluding all tags leaves the commit. Without optional locks this does not disturb a git command that runs now.
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = run_command(command, _GIT_SECONDS, environment=environment)
    except CommandError:
        return None
    return answer.out.strip() if answer.status == 0 else None
