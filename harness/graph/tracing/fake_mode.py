"""Makes fake tensors with short sizes after an uneven all-to-all.

Torch sums all split sizes: for 64 ranks, the received rows are u0 + u1 + ... + u63. Every dependent size repeats that
sum, which makes each operator slow. Here the number of rows is u0 + v, with a single new symbol v for all splits but
the first.

All-to-alls with equal splits share v, so that equal sizes stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.graph import symbols
from bitproof.harness.graph.tracing import fake_kernels as fake_kernels  # registers a missing shape function
from bitproof.harness.torch_compat import FakeTensorMode, assume
from bitproof.harness.torch_fakes import FakeResults
from bitproof.harness.torch_sizes import remember_arithmetic
from bitproof.harness.torch_tracing import device_asked


def step_fake_mode(shape_env: ShapeEnv, *, remembers: bool = True, repeats: bool = False) -> FakeTensorMode:
    """Return a FakeTensorMode with short sizes after an uneven all-to-all, such as u0 + v instead of u0 + u1 + u2.

    - `remembers`: True to use torch's own cache of operator calls.
    - `repeats`: True to compute only one of several layers that differ only in their symbols (torch_fakes.py).
    """
    # A trace with an open dim does not use `repeats`: sizes in repeated results would be new objects, and that would
    # change the numbers of the tracer's nodes. It would also be slower: 61 layers took 109 s instead of 64 s.
    mode = FakeTensorMode(shape_env=shape_env)
    remember_arithmetic(shape_env)
    mode.cache_enabled = mode.cache_enabled and remembers
    compute = FakeResults(mode, shape_env, mode.dispatch) if repeats else mode.dispatch
    # An attribute of the object, not a subclass: higher-order operators look up their rules by exact class.
    mode.dispatch = _Dispatch(mode, shape_env, compute)  # type: ignore[method-assign]
    return mode


class _Dispatch:
    """Computes an operator's fake result as torch does, except for the size of an uneven all-to-all."""

    def __init__(self, mode: FakeTensorMode, shape_env: ShapeEnv, compute: Callable[..., Any]) -> None:
        self._mode = mode
        self._shape_env = shape_env
        self._plain = compute
        self._num_rows: dict[Any, Any] = {}

    def __call__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (device := device_asked(func, args)) is not None:
            return device
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            splits = tuple(map(symbols.expression, args[1]))
            # A sum of at most two splits is as short as it can be, and a sum of numbers is a number.
            if len(splits) > 2 and not all(isinstance(split, int) for split in splits):
                return self._all_to_all(args[0], args[1][0], splits)
        return self._plain(func, types, args, kwargs or {})

    def _all_to_all(self, x: Tensor, first: Any, splits: tuple[Any, ...]) -> Tensor:
        # Equal splits get the same symbol, so that equal sizes stay equal.
        if splits not in self._num_rows:
            with self._shape_env.ignore_fresh_unbacked_symbols():
                rest = self._shape_env.create_unbacked_symint()
            # Both are numbers of rows, which torch cannot know of a symbol without a number.
            assume(first >= 0)
            assume(rest >= 0)
            self._num_rows[splits] = first + rest
        with self._mode:
            return x.new_empty((self._num_rows[splits], *x.shape[1:]))
