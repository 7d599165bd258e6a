"""Reads how torch was built, without preventing later forks of ranks."""

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
    """The full version, the commit of the build, and its settings."""

    version: str
    commit: str
    settings: str

    def parts(self) -> tuple[str, str, str]:
        """Return all three, for a key or a digest."""
        return self.version, self.commit, self.settings


def torch_build() -> TorchBuild:
    """Return how this process's torch was built. Raises MachineError if a build for CUDA does not describe itself.

    Reading such a build starts CUDA's driver, and no rank forked from a process that has started it can use a GPU. So a
    process that has not yet used a GPU lets a fork of itself read.
    """
    import torch

    is_safe = torch.version.cuda is None or torch.cuda.is_initialized()
    return read_here() if is_safe else read_elsewhere()


def read_here() -> TorchBuild:
    """Return the build as read in this process. This may start CUDA's driver."""
    from bitproof.harness.torch_compat import build

    return TorchBuild(*build())


@functools.cache
def read_elsewhere() -> TorchBuild:
    """Return the build as read in a fork of this process."""

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
