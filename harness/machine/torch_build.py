"""What torch was built from and with, asked so that ranks can be forked afterwards."""

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
    """The whole version, the commit it was built from, and with what it was built."""

    version: str
    commit: str
    settings: str

    def parts(self) -> tuple[str, str, str]:
        """All three, for a key or a digest."""
        return self.version, self.commit, self.settings


def torch_build() -> TorchBuild:
    """This torch. Raises MachineError where a build for CUDA does not say what it is.

    Such a build asks CUDA's driver, and so starts it, and no rank that is forked from a process that has started it can
    use a GPU. So a process that has not yet used a GPU has a fork of itself ask.
    """
    import torch

    is_safe = torch.version.cuda is None or torch.cuda.is_initialized()
    return read_here() if is_safe else read_elsewhere()


def read_here() -> TorchBuild:
    """What this process says, which may start CUDA's driver in it."""
    from bitproof.harness.torch_compat import build

    return TorchBuild(*build())


@functools.cache
def read_elsewhere() -> TorchBuild:
    """What a fork of this process says."""

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
