"""Reads how torch was built, in such a way that ranks can still be forked afterwards."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import cast

from bitproof.harness.errors import MachineError
from bitproof.harness.processes import framing
from bitproof.harness.processes.forked import Send, fork

_SECONDS = 120.0


@dataclass(frozen=True)
class TorchBuild:
    """How torch was built: its full version, the commit, and the settings of the build."""

    version: str
    commit: str
    settings: str

    def parts(self) -> tuple[str, str, str]:
        """The version, the commit and the settings, for a key or a digest."""
        return self.version, self.commit, self.settings


def torch_build() -> TorchBuild:
    """How this process's torch was built. Raises MachineError if a build for CUDA does not describe itself."""
    import torch

    # Reading a build for CUDA starts CUDA's driver, and then no forked rank could use a GPU. So a process that has not
    # used a GPU yet forks another process for reading.
    is_safe = torch.version.cuda is None or torch.cuda.is_initialized()
    return read_here() if is_safe else read_elsewhere()


def read_here() -> TorchBuild:
    """Read in this process how torch was built. This may start CUDA's driver."""
    from bitproof.harness.torch_compat import build

    return TorchBuild(*build())


@functools.cache
def read_elsewhere() -> TorchBuild:
    """Read how torch was built, in a fork of this process."""

    def ask(send: Send) -> None:
        send(read_here())

    asked = fork(ask)
    try:
        line = asked.inlet.wait(_SECONDS)
    finally:
        asked.kill()
    if line is None:
        raise MachineError(
            "torch does not say what it was built with",
            found=f"no answer within {_SECONDS:g} s, or a process that ended",
            fix="see what `python -c 'import torch; print(torch.__config__.show())'` says",
        )
    return cast(TorchBuild, framing.read(line, TorchBuild))
