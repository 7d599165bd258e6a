"""Define the bounds of a case's numbers. The case's constructor refuses values outside these bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitproof.harness.errors import CaseError

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Bounds:
    """The numbers from `low` to `high`, without `high` if `is_open` is True. Only integers if `low` is an integer."""

    low: int | float
    high: int | float
    is_open: bool = False

    def check(self, field: str, value: Any) -> None:
        """Raise CaseError, naming the field, if the value is not within the bounds, or is `True` or `False`."""
        is_whole = isinstance(self.low, int)
        # `bool` is a kind of `int` in Python, so `True` is refused by name below.
        kinds = int if is_whole else (int, float)
        # A NaN is within no bounds: each comparison with it is false.
        if isinstance(value, kinds) and not isinstance(value, bool) and self._holds(value):
            return
        raise CaseError(
            f"{field} is out of range",
            expected=f"an integer from {self.low:,} to {self.high:,}"
            if is_whole
            else f"a number from {self.low:g} to {'below ' if self.is_open else ''}{self.high:g}",
            found=f"{field}={_short(value)}",
        )

    def _holds(self, value: int | float) -> bool:
        return self.low <= value < self.high if self.is_open else self.low <= value <= self.high


LONGEST_NAME = 100
"""The maximum number of characters in a case's name."""

SEED = Bounds(0, 2**32 - 1)
"""numpy's range of seeds, since it is the smallest among the generators that are seeded."""
STEPS = Bounds(1, 1_000_000)
RANKS = Bounds(1, 65_536)
MOST_STEPS_OF_RANKS = 10_000_000
"""Steps times ranks: the limit for a recording."""
SEQUENCES = Bounds(1, 65_536)
TOKENS = Bounds(1, 1 << 24)
GIB = Bounds(0.0, 1e6)
MIB = Bounds(0.0, 1e9)
BLOCKS_AHEAD = Bounds(0, 1000)
RATE = Bounds(0.0, FLOAT32_MAX)
"""Rates multiply float32 values or are added to them, and a larger rate would become infinity in float32."""
CAPACITY = Bounds(0.001, 1000.0)
LOSS_PIECES = Bounds(1, 4096)
BETA = Bounds(0.0, 1.0, is_open=True)

SIZES = {
    "layers": Bounds(1, 10_000),
    "dense_layers": Bounds(0, 10_000),
    "experts": Bounds(1, 65_536),
    "top_k": Bounds(1, 65_536),
    "dim": Bounds(1, 1 << 20),
    "heads": Bounds(1, 65_536),
}
"""The sizes of a model that a case may state."""


def _short(value: Any) -> str:
    # Python does not convert integers of more than some thousand digits.
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"an integer of {value.bit_length():,} bits"
    return repr(value)[:100]
