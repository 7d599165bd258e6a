"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bitproof.harness.errors import CaseError
from bitproof.reference.layers.router import Router, RoutingConfig, count_rows, select_experts

CONFIG = RoutingConfig(num_experts=8, top_k=3, score="sigmoid", num_groups=4, top_groups=2, norm=True, scale=2.5)
NO_BIAS = torch.zeros(8)


def rows(num_tokens: int = 32) -> Tensor:
    return torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(0))


def router(config: RoutingConfig) -> Router:
    made = Router(16, config)
    with torch.no_grad():
        made.weight.copy_(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))
    return made


def test_a_token_goes_to_its_best_experts_best_first() -> None:
    scores_TE = torch.tensor([[0.1, 0.9, 0.2, 0.3, 0.8, 0.4, 0.5, 0.6]])
    ungrouped = replace(CONFIG, num_groups=1, top_groups=1)
    assert select_experts(scores_TE, NO_BIAS, ungrouped).tolist() == [[1, 4, 7]]


def test_no_token_uses_more_than_the_top_groups() -> None:
    experts_TK = router(CONFIG)(rows(), NO_BIAS).experts_TK
    assert all(len({expert // 2 for expert in token}) <= 2 for token in experts_TK.tolist())
    unlimited_TK = router(replace(CONFIG, top_groups=4))(rows(), NO_BIAS).experts_TK
    assert any(len({expert // 2 for expert in token}) > 2 for token in unlimited_TK.tolist())


def test_a_sigmoid_group_scores_by_its_two_best_experts_and_a_softmax_group_by_its_best() -> None:
    scores_TE = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.6, 0.35, 0.0, 0.0]])
    config = replace(CONFIG, top_k=2, top_groups=1)
    assert select_experts(scores_TE, NO_BIAS, config).tolist() == [[2, 3]]
    assert select_experts(scores_TE, NO_BIAS, replace(config, score="softmax")).tolist() == [[0, 1]]


def test_a_group_left_out_is_not_chosen_even_when_every_bias_is_negative() -> None:
    scores_TE = torch.tensor([[0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4]])
    assert sorted(select_experts(scores_TE, NO_BIAS - 1, replace(CONFIG, top_k=4)).tolist()[0]) == [4, 5, 6, 7]


def test_the_expert_bias_moves_the_selection_and_leaves_the_weights_alone() -> None:
    plain = replace(CONFIG, num_groups=1, top_groups=1, norm=False)
    bias_E = NO_BIAS.clone()
    bias_E[5] = 10.0
    before, after = router(plain)(rows(), NO_BIAS), router(plain)(rows(), bias_E)
    assert (before.experts_TK == 5).any(1).logical_not().any()
    assert (after.experts_TK[:, 0] == 5).all()
    scores_TE = (rows() @ router(plain).weight.t()).sigmoid()
    torch.testing.assert_close(after.weights_TK, 2.5 * scores_TE.gather(1, after.experts_TK))


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_normalized_weights_sum_to_the_scale(score: Any) -> None:
    weights_TK = router(replace(CONFIG, score=score))(rows(), NO_BIAS).weights_TK
    torch.testing.assert_close(weights_TK.sum(1), torch.full((32,), 2.5))


def test_scores_are_float32_for_bfloat16_rows_and_weights() -> None:
    made = router(CONFIG)
    made.weight.data = made.weight.data.bfloat16()
    wide = router(CONFIG)
    wide.weight.data = made.weight.data.float()
    weights_TK = made(rows().bfloat16(), NO_BIAS).weights_TK
    assert weights_TK.dtype == torch.float32
    assert torch.equal(weights_TK, wide(rows().bfloat16().float(), NO_BIAS).weights_TK)


def test_counts_say_how_many_rows_each_expert_gets() -> None:
    counts_E = count_rows(torch.tensor([[0, 3], [3, 1]]), 5)
    assert counts_E.dtype == torch.int64
    assert counts_E.tolist() == [1, 1, 0, 2, 0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_groups": 3}, "num_experts=8, num_groups=3"),
        ({"top_groups": 5}, "top_groups=5, num_groups=4"),
        ({"top_k": 5}, "top_k=5, 2 groups of 2"),
        ({"score": "tanh"}, "'tanh'"),
    ],
)
def test_a_routing_that_contradicts_itself_is_refused(change: dict[str, Any], complaint: str) -> None:
    replace(CONFIG, top_k=4)
    with pytest.raises(CaseError, match=complaint):
        replace(CONFIG, **change)
