"""Rotary embedding: angles, tables and YaRN's blend."""

from __future__ import annotations

import math

import pytest
import torch

from bitproof.harness.errors import CaseError
from bitproof.reference.layers.rope import Llama3Scaling, RopeConfig, RotaryEmbedding, Yarn, rotary_frequencies


def test_each_even_odd_pair_turns_by_its_positions_angle() -> None:
    rope = RotaryEmbedding(4, RopeConfig(max_seq_len=16))
    x_BSHR = torch.tensor([1.0, 0.0, 0.0, 1.0]).view(1, 1, 1, 4)
    y = rope(x_BSHR, torch.tensor([[3]])).flatten().tolist()
    slow = 3 * 10000**-0.5
    assert y == pytest.approx([math.cos(3), math.sin(3), -math.sin(slow), math.cos(slow)], abs=1e-6)


def test_position_zero_turns_nothing() -> None:
    rope = RotaryEmbedding(8, RopeConfig(max_seq_len=4))
    x_BSHR = torch.randn(2, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rope(x_BSHR, torch.zeros(2, 1, dtype=torch.int64)), x_BSHR)


def test_a_query_and_a_key_meet_by_their_distance_alone() -> None:
    rope = RotaryEmbedding(8, RopeConfig(max_seq_len=64))
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    near = (rope(q, torch.tensor([[7]])) * rope(k, torch.tensor([[4]]))).sum()
    far = (rope(q, torch.tensor([[57]])) * rope(k, torch.tensor([[54]]))).sum()
    other = (rope(q, torch.tensor([[57]])) * rope(k, torch.tensor([[53]]))).sum()
    torch.testing.assert_close(near, far)
    assert not torch.isclose(near, other)


def test_a_position_past_the_table_is_an_error_and_the_last_one_is_not() -> None:
    rope = RotaryEmbedding(8, RopeConfig(max_seq_len=4))
    x_BSHR = torch.ones(1, 1, 1, 8)
    rope(x_BSHR, torch.tensor([[3]]))
    with pytest.raises(IndexError):
        rope(x_BSHR, torch.tensor([[4]]))


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(CaseError) as refusal:
        RotaryEmbedding(7, RopeConfig(max_seq_len=4))
    assert str(refusal.value) == (
        "CaseError: rotary embedding turns pairs\n  expected: an even rope head dim\n  found: 7"
    )


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_blends_between() -> None:
    plain = rotary_frequencies(64, RopeConfig(max_seq_len=16))
    yarn = Yarn(factor=40.0, original_seq_len=4096)
    ratio = rotary_frequencies(64, RopeConfig(max_seq_len=16, scaling=yarn)) / plain
    torch.testing.assert_close(ratio[:11], torch.ones(11))
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40))
    between = ratio[10:24]
    assert (between[1:] < between[:-1]).all()


def test_yarn_scales_the_softmax_as_published() -> None:
    assert Yarn(factor=40.0, original_seq_len=4096).attention_scale() == pytest.approx(1.3689**2, rel=1e-4)
    assert Yarn(factor=1.0, original_seq_len=4096).attention_scale() == 1.0


def test_tables_built_on_meta_get_their_values_once_they_have_storage() -> None:
    config = RopeConfig(max_seq_len=16, scaling=Yarn(factor=4.0, original_seq_len=8))
    with torch.device("meta"):
        rope = RotaryEmbedding(8, config)
    assert rope.cos_LP.is_meta
    rope = rope.to_empty(device="cpu")
    rope.reset_tables()
    built = RotaryEmbedding(8, config)
    assert torch.equal(rope.cos_LP, built.cos_LP)
    assert torch.equal(rope.sin_LP, built.sin_LP)


def test_llama_3_keeps_fast_pairs_divides_slow_ones_and_blends_between_by_their_turns() -> None:
    plain = rotary_frequencies(128, RopeConfig(max_seq_len=16, theta=500000.0))
    scaling = Llama3Scaling(factor=8.0, original_seq_len=8192)
    ratio = rotary_frequencies(128, RopeConfig(max_seq_len=16, theta=500000.0, scaling=scaling)) / plain
    turns = 8192 * plain / (2 * math.pi)
    fast, slow = turns > 4, turns < 1
    assert (fast.sum(), slow.sum()) == (29, 29)
    torch.testing.assert_close(ratio[fast], torch.ones(29))
    torch.testing.assert_close(ratio[slow], torch.full((29,), 1 / 8))
    share = (turns[29:35] - 1) / 3
    torch.testing.assert_close(ratio[29:35], share + (1 - share) / 8)


def test_llama_3_leaves_the_softmax_alone() -> None:
    assert Llama3Scaling(factor=8.0, original_seq_len=8192).attention_scale() == 1.0
