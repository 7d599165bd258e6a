"""The rows that an uneven all-to-all delivers: two symbols, however many ranks send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.graph.symbols import expression, free_symbols
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode

all_to_all_single = torch.ops._c10d_functional.all_to_all_single.default


@pytest.fixture
def mode() -> FakeTensorMode:
    return step_fake_mode(shape_env=ShapeEnv())


def splits(mode: FakeTensorMode, count: int) -> list[Any]:
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        return [mode.shape_env.create_unbacked_symint() for _ in range(count)]


def deliver(mode: FakeTensorMode, output_splits: list[Any], *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with mode:
        x = torch.empty(6, 8, dtype=dtype)
        return all_to_all_single(x, output_splits, [1] * len(output_splits), "ep")


@pytest.mark.parametrize("num_ranks", [2, 3, 64])
def test_the_rows_of_any_number_of_ranks_are_a_sum_of_two_symbols(mode: FakeTensorMode, num_ranks: int) -> None:
    received = splits(mode, num_ranks)
    x = deliver(mode, received)
    rows = x.shape[0]
    assert len(free_symbols(rows)) == 2
    assert expression(received[0]) in free_symbols(rows)
    assert (x.dim(), x.shape[1], x.stride(), x.dtype) == (2, 8, (8, 1), torch.bfloat16)


def test_two_ranks_rows_are_the_sum_of_their_splits(mode: FakeTensorMode) -> None:
    received = splits(mode, 2)
    assert expression(deliver(mode, received).shape[0]) == expression(received[0] + received[1])


def test_equal_splits_give_equal_sizes_and_others_do_not(mode: FakeTensorMode) -> None:
    first, second = splits(mode, 4), splits(mode, 4)
    sizes = [expression(deliver(mode, x, dtype=d).shape[0]) for x, d in ((first, torch.bfloat16), (first, torch.int64))]
    assert sizes[0] == sizes[1]
    assert expression(deliver(mode, second).shape[0]) != sizes[0]
    assert expression(deliver(mode, [first[0], *second[1:]]).shape[0]) != sizes[0]


def test_numbers_are_added_as_torch_adds_them(mode: FakeTensorMode) -> None:
    assert deliver(mode, [1, 2, 3]).shape == (6, 8)


def test_a_number_of_rows_is_known_not_to_be_negative(mode: FakeTensorMode) -> None:
    assert mode.shape_env is not None
    rows = deliver(mode, splits(mode, 3)).shape[0]
    assert [mode.shape_env.var_to_range[symbol].lower for symbol in free_symbols(rows)] == [0, 0]


def test_torch_itself_would_add_every_split(mode: FakeTensorMode) -> None:
    """What this mode is for: should torch come to do better, it can go."""
    received = splits(mode, 5)
    with mode:
        x = torch.empty(5, 8)
    plain = FakeTensorMode.dispatch(mode, all_to_all_single, (), (x, received, [1] * 5, "ep"))
    assert len(free_symbols(plain.shape[0])) == 5


@pytest.mark.parametrize("remembers", [True, False])
def test_a_mode_that_remembers_no_call_gives_the_same_layouts(remembers: bool) -> None:
    mode = step_fake_mode(ShapeEnv(), remembers=remembers)
    before = FakeTensorMode.cache_info()
    with mode:
        x = torch.empty(6, 8, dtype=torch.bfloat16)
        for _ in range(2):
            y = x.t().sum(0, dtype=torch.float32)
    assert (y.shape, y.stride(), y.dtype) == ((6,), (1,), torch.float32)
    assert (FakeTensorMode.cache_info() != before) == remembers
