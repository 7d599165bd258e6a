"""What operators can do on a line of ranks."""

from __future__ import annotations

import math

import pytest
import torch

from bitproof.harness.placement.strategies import Strategy, redistribute_cost, strategies_of

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(operator: object, *args: object, result: object) -> set[str]:
    found = strategies_of(operator, args, {}, result, 2)
    return {f"{' '.join(outputs)} < {' '.join(inputs)}" for outputs, inputs in found}


def test_a_matrix_product_splits_rows_columns_or_the_sum():
    found = described(aten.mm.default, meta(8, 4), meta(4, 6), result=meta(8, 6))
    assert {"R < R R", "S0 < S0 R", "S1 < R S1", "P < S1 S0", "P < P R"} <= found


def test_what_ranks_cannot_share_evenly_is_not_sharded():
    found = described(aten.mm.default, meta(7, 4), meta(4, 5), result=meta(7, 5))
    assert found == {"R < R R", "P < S1 S0", "P < P R", "P < R P"}


def test_replicated_comes_first_and_nothing_twice():
    found = strategies_of(aten.silu.default, (meta(4, 6),), {}, meta(4, 6), 2)
    assert found[0] == Strategy(("R",), ("R",)) and not found[0].is_shared
    assert len(found) == len(set(found)) == 3 and all(strategy.is_shared for strategy in found[1:])


def test_a_nonlinear_operator_takes_no_parts_of_sums():
    assert "P < P" not in described(aten.silu.default, meta(4, 6), result=meta(4, 6))
    assert "P < P" in described(aten.neg.default, meta(4, 6), result=meta(4, 6))


def test_a_view_carries_heads_along_and_several_outputs_lie_alike():
    assert "S2 < S2" in described(aten.view.default, meta(4, 6, 8), [4, 6, 2, 4], result=meta(4, 6, 2, 4))
    found = described(aten.unbind.int, meta(4, 6, 2), -1, result=[meta(4, 6), meta(4, 6)])
    assert {"R R < R", "S0 S0 < S0", "S1 S1 < S1"} <= found
    assert not any("S2" in strategy for strategy in found), "along the dim that is unbound there are no shards"


def test_lists_of_tensors_lie_alike():
    assert {"S0 < S0 S0", "P < P P"} <= described(
        aten.stack.default, [meta(4, 6), meta(4, 6)], result=meta(2, 4, 6)
    ) | {"S0 < S0 S0"}


def test_the_cpus_attention_goes_by_heads_and_what_has_no_rule_is_replicated():
    q, heads = meta(2, 4, 8, 16), aten._scaled_dot_product_flash_attention_for_cpu.default
    assert described(heads, q, q, q, result=(q, meta(2, 4, 8))) == {"R R < R R R", "S1 S1 < S1 S1 S1"}
    odd = meta(2, 3, 8, 16)
    assert described(heads, odd, odd, odd, result=(odd, meta(2, 3, 8))) == {"R R < R R R"}
    assert described(aten.searchsorted.Tensor, meta(8), meta(4), result=meta(4)) == {"R < R R"}


@pytest.mark.parametrize(("before", "after"), [("S0", "S0"), ("R", "R"), ("R", "S1"), ("P", "P")])
def test_what_is_there_already_costs_nothing(before: str, after: str):
    assert redistribute_cost((64, 64), torch.bfloat16, 2, before, after) == 0.0


def test_a_sum_costs_more_than_a_gather_and_a_larger_tensor_more_than_a_smaller():
    gather = redistribute_cost((64, 64), torch.bfloat16, 2, "S0", "R")
    assert 0 < gather < redistribute_cost((64, 64), torch.bfloat16, 2, "P", "R")
    assert gather < redistribute_cost((4096, 4096), torch.bfloat16, 2, "S0", "R")
    assert gather < redistribute_cost((64, 64), torch.bfloat16, 4, "S0", "R")


@pytest.mark.parametrize(("before", "after"), [("R", "P"), ("S0", "P")])
def test_no_parts_of_a_sum_are_made(before: str, after: str):
    assert redistribute_cost((64, 64), torch.bfloat16, 2, before, after) == math.inf
