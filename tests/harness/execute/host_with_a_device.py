"""A host in a build of torch that knows of a device: what builds for CUDA are everywhere, and those for the CPU never.

Autograd starts a thread for each device when it first runs in a process, and is refused in what is forked from there.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register_device

START = Path(__file__).parents[3] / "bitproof" / "harness" / "runtime" / "start.py"


class Device:
    """As much of a device as autograd asks for."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Nothing is drawn there."""

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False


def register() -> None:
    """Let torch know of the device, in this process."""
    register_device("toy", Device())


if __name__ == "__main__":
    register()
    runpy.run_path(str(START), run_name="__main__")
