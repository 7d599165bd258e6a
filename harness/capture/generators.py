"""Record the states of the global random number generators, as records of kind `rng`.

A generator is recorded after each step that drew from it. Generators that a step creates for its own use are not
recorded.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import torch
from torch import Tensor


class Generators:
    """A snapshot of the states of the generators of torch, CUDA, Python and NumPy."""

    def __init__(self) -> None:
        self._before = _states()

    def drawn(self) -> dict[str, Tensor]:
        """Return name -> present state as bytes, for each generator whose state has changed since the snapshot."""
        changed = {name: state for name, state in _states().items() if state != self._before.get(name)}
        return {name: torch.frombuffer(bytearray(state), dtype=torch.uint8) for name, state in changed.items()}


def _states() -> dict[str, bytes]:
    import numpy

    _, numbers, gauss = random.getstate()
    legacy: Any = numpy.random.get_state()
    found = {"torch": torch.get_rng_state()}
    # Reading the state would start CUDA in a process that does not use it.
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return {name: state.numpy().tobytes() for name, state in found.items()} | {
        # Both generators keep the second of two normal numbers for the next draw, so it is a part of the state.
        "python": struct.pack(f"<{len(numbers)}I?d", *numbers, gauss is not None, gauss or 0.0),
        "numpy": legacy[1].tobytes() + struct.pack("<qqd", *legacy[2:]),
    }
