"""Runs a graph on inputs with open sizes: symbols that have bounds, but no number.

A tracer uses an example number for each symbolic size, and a traced call may depend on this number. Here the graph runs
without example numbers. A call that needs a number then fails, and is refused.

Lower bounds are at least 2, because tensors with a size of 0 or 1 have other layouts, and broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.graph import symbols
from bitproof.harness.powers.proofs.prover.graphs.expressions import size_of
from bitproof.harness.torch_compat import assume, range_of

LEAST = 2
"""The smallest number that an open size may stand for."""


@dataclass
class SizeBounds:
    """The bounds of the open sizes of a graph's inputs. `found` maps where a size occurs to (least, most).

    For example, `dim 0 of input 1` -> (2, 64). `most` is None if there is no limit. A size that occurs several times is
    listed only where it occurs first.
    """

    found: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    def joined(self, other: SizeBounds) -> Iterator[str]:
        """Yield the bounds that `self` and `other` together imply, as lines such as `dim 0 of input 1: 2 to 64`."""
        for place in dict.fromkeys([*self.found, *other.found]):
            sides = [x.found[place] for x in (self, other) if place in x.found]
            most = min((end for _, end in sides if end is not None), default=None)
            least = max(begin for begin, _ in sides)
            yield f"{place}: {least} or more" if most is None else f"{place}: {least} to {most}"


class OpenSizes:
    """Replaces the symbols of a tracer by new symbols without example numbers, in the sizes of a graph's inputs.

    It adds the bounds of the new symbols to `bounds`. Use it within the fake mode of `shape_env`.
    """

    def __init__(self, shape_env: ShapeEnv, bounds: SizeBounds) -> None:
        self._shape_env = shape_env
        self._bounds = bounds
        self._own: dict[Any, Any] = {}

    def size(self, size: Any, place: str) -> Any:
        """Return a size of an input after replacing the tracer's symbols by new symbols.

        `place` is where the size occurs, such as `dim 0 of input 1`. Raises ValueError unless the size is a sum of
        products of symbols.
        """
        if isinstance(size, int):
            return size
        if not isinstance(size, torch.SymInt):
            raise ValueError(f"a size that is a {type(size).__name__}")
        expression = symbols.expression(size)
        if isinstance(expression, int) or expression.is_Integer:
            return int(expression)
        # The symbols are a set. Sorted, they get the same new symbols in every process.
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._own:
                self._own[symbol] = self._opened(range_of(size, symbol), place)
        # The same polynomial, over new symbols.
        by_name = {str(symbol): own for symbol, own in self._own.items()}
        found = 0
        for coefficient, *names in _products(size_of(expression)):
            product = coefficient
            for name in names:
                product = product * by_name[name]
            found = found + product
        return found

    def _opened(self, bounds: tuple[int | None, int | None], place: str) -> Any:
        least, most = max(LEAST, bounds[0] or 0), bounds[1]
        # The symbol belongs to an input, and torch would look for it among the results of the present call.
        with self._shape_env.ignore_fresh_unbacked_symbols():
            own = self._shape_env.create_unbacked_symint()
        assume(own >= least)
        if most is not None:
            assume(own <= most)
        self._bounds.found[place] = least, most
        return own


def _products(size: Any) -> list[tuple[Any, ...]]:
    return [(size,)] if isinstance(size, int) else list(size[1:])
