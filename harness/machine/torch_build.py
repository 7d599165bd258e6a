"""Read how torch was built, without starting CUDA in a process that later forks ranks."""

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
        return self.version, self.commit, self.settings


def torch_build() -> TorchBuild:
    """Return how torch was built. Raises MachineError if the process that reads it does not answer."""
    import torch

    # Reading a build for CUDA starts CUDA's driver, and then no forked rank could use a GPU. So a process that has not
    # used a GPU yet forks another process for reading.
    is_safe = torch.version.cuda is None or torch.cuda.is_initialized()
    return read_here() if is_safe else read_elsewhere()


def read_here() -> TorchBuild:
    from bitproof.harness.torch_compat import build

    return TorchBuild(*build())


@functools.cache
def read_elsewhere() -> TorchBuild:

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
