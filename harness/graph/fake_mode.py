"""Fake execution in which the number of rows that an uneven all-to-all delivers is a short sum.

torch gives such a tensor the sum of its split sizes as its size: among 64 ranks a sum of 64 symbols, which is in every
size, stride and element count of whatever is computed from it, and which torch sorts, multiplies and compares at every
operator. Here it is the first split's symbol plus one symbol for all the others, as it always is among two ranks.
Equal splits get the same symbol, so sizes that were equal still are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.graph import symbols


class StepFakeMode(FakeTensorMode):
    """A FakeTensorMode with the above; it needs a shape environment."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_rows: dict[Any, Any] = {}

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator; torch calls this."""
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            splits = tuple(map(symbols.expression, args[1]))
            if len(splits) > 2 and not all(isinstance(split, int) for split in splits):
                return self._deliver(args[0], args[1][0], splits)
        return super().dispatch(func, types, args, kwargs or {})

    def _deliver(self, x: Tensor, first: Any, splits: tuple[Any, ...]) -> Tensor:
        if splits not in self._num_rows:
            assert self.shape_env is not None
            with self.shape_env.ignore_fresh_unbacked_symbols():
                rest = self.shape_env.create_unbacked_symint()
            torch._check(first >= 0)
            torch._check(rest >= 0)
            self._num_rows[splits] = first + rest
        with self:
            return x.new_empty((self._num_rows[splits], *x.shape[1:]))
