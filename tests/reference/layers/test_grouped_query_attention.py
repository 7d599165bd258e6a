"""Grouped-query attention against attention one head at a time, and parts of its heads on their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bitproof.harness.errors import CaseError
from bitproof.reference.init import initialize
from bitproof.reference.layers.grouped_query_attention import GroupedQueryAttention, GroupedQueryConfig
from bitproof.reference.layers.rope import RopeConfig

CONFIG = GroupedQueryConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(max_seq_len=16))
POSITIONS_BS = torch.arange(5).repeat(2, 1)


def attention(config: GroupedQueryConfig) -> GroupedQueryAttention:
    made = GroupedQueryAttention(32, config)
    initialize(made, seed=0)
    return made


def random_rows() -> Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def test_two_query_heads_in_a_row_read_one_key_value_head() -> None:
    made, x_BSD = attention(CONFIG), random_rows()
    q, k, v = (layer(x_BSD).unflatten(-1, (-1, 8)) for layer in (made.wq, made.wk, made.wv))
    q, k = made.rope(q, POSITIONS_BS), made.rope(k, POSITIONS_BS)
    ahead = torch.ones(5, 5).triu(1).bool()
    heads = []
    for head, shared in enumerate((0, 0, 1, 1)):
        scores = q[:, :, head] @ k[:, :, shared].transpose(1, 2) * 8**-0.5
        heads.append(scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v[:, :, shared])
    torch.testing.assert_close(made(x_BSD, POSITIONS_BS), made.wo(torch.cat(heads, -1)))


def test_heads_are_normalized_before_they_are_rotated() -> None:
    made = attention(replace(CONFIG, qk_norm=True))
    assert {name for name, _ in made.named_children()} >= {"q_norm", "k_norm"}
    plain, x_BSD = attention(CONFIG), random_rows()
    before = made(x_BSD, POSITIONS_BS)
    assert not torch.allclose(before, plain(x_BSD, POSITIONS_BS))
    with torch.no_grad():  # a norm takes the size of what it normalizes away
        made.wq.weight.mul_(100.0)
    torch.testing.assert_close(made(x_BSD, POSITIONS_BS), before, rtol=1e-4, atol=1e-5)


def test_without_norms_there_are_no_parameters_of_theirs() -> None:
    assert {name.split(".")[0] for name, _ in attention(CONFIG).named_parameters()} == {"wq", "wk", "wv", "wo"}


def test_half_of_the_heads_give_a_partial_sum_of_the_output() -> None:
    whole, x_BSD = attention(CONFIG), random_rows()
    parts = []
    for first in (0, 1):
        part = attention(CONFIG)
        for name, dim in (("wq", 0), ("wk", 0), ("wv", 0), ("wo", 1)):
            weight = whole.get_submodule(name).get_parameter("weight")
            part.get_submodule(name).weight = nn.Parameter(weight.chunk(2, dim)[first])
        parts.append(part(x_BSD, POSITIONS_BS))
    torch.testing.assert_close(parts[0] + parts[1], whole(x_BSD, POSITIONS_BS))


def test_query_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(CaseError) as refusal:
        replace(CONFIG, num_kv_heads=3)
    assert str(refusal.value) == (
        "CaseError: query heads must share key/value heads evenly\n"
        "  expected: num_heads a multiple of num_kv_heads, both at least 1\n"
        "  found: num_heads=4, num_kv_heads=3"
    )
    assert replace(CONFIG, num_kv_heads=1).num_kv_heads == 1
