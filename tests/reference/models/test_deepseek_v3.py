"""The model's tree, and its bits under a split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bitproof.harness.case import Model
from bitproof.harness.errors import CaseError
from bitproof.reference.init import initialize
from bitproof.reference.models import build_model, model_config
from bitproof.reference.models.deepseek_v3 import DeepSeekV3

BUFFERS = {"expert_bias", "tokens_per_expert", "cos_LP", "sin_LP"}


@pytest.fixture
def tiny() -> nn.Module:
    model = build_model(Model(flavor="tiny"))
    initialize(model, seed=0)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def random_rows(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_names_follow_the_tree(tiny: nn.Module) -> None:
    names = [name for name, _ in tiny.named_children()]
    assert names == ["tok_embeddings", "layers", "norm", "output"]
    dense, sparse = tiny.get_submodule("layers.0"), tiny.get_submodule("layers.1")
    assert [name for name, _ in dense.named_children()] == ["attention_norm", "attention", "ffn_norm", "feed_forward"]
    assert [name for name, _ in sparse.named_children()] == ["attention_norm", "attention", "ffn_norm", "moe"]
    assert {name.rsplit(".", 1)[-1] for name, _ in tiny.named_buffers()} == BUFFERS


def test_rotary_tables_stay_out_of_the_state_dict(tiny: nn.Module) -> None:
    assert {name.rsplit(".", 1)[-1] for name in tiny.state_dict()} & BUFFERS == {"expert_bias", "tokens_per_expert"}


def test_an_attention_mask_that_is_no_block_mask_is_refused(tiny: nn.Module) -> None:
    tokens_BS = torch.zeros(2, 6, dtype=torch.int64)
    with pytest.raises(CaseError) as refusal:
        tiny(tokens_BS, tokens_BS, attention_masks=torch.ones(6, 6))
    assert str(refusal.value) == (
        "CaseError: attention masks of this type are not supported\n"
        "  expected: a BlockMask, or None, which means causal attention\n"
        "  found: Tensor"
    )


@pytest.mark.parametrize("shape", [(4, 32), (4, 6), (2, 2)])
@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "sequence"])
def test_a_moe_split_in_two_gives_the_whole_ones_bits(tiny: nn.Module, dim: int, shape: tuple[int, int]) -> None:
    moe = tiny.get_submodule("layers.1.moe")
    x_BSD = random_rows((*shape, 64)).requires_grad_()
    upstream_BSD = random_rows((*shape, 64)).neg()
    whole = moe(x_BSD)
    (whole_grad,) = torch.autograd.grad(whole, x_BSD, upstream_BSD)
    halves: list[Tensor] = []
    half_grads: list[Tensor] = []
    for x, upstream in zip(x_BSD.chunk(2, dim), upstream_BSD.chunk(2, dim), strict=True):
        x = x.detach().contiguous().requires_grad_()
        halves.append(moe(x))
        half_grads += torch.autograd.grad(halves[-1], x, upstream.contiguous())
    assert torch.equal(bits(whole), bits(torch.cat(halves, dim)))
    assert torch.equal(bits(whole_grad), bits(torch.cat(half_grads, dim)))


def test_a_block_split_along_the_sequence_does_not_since_attention_looks_back(tiny: nn.Module) -> None:
    block = tiny.get_submodule("layers.1")
    x_BSD, positions_BS = random_rows((4, 32, 64)), torch.arange(32).repeat(4, 1)
    halves = [block(x.contiguous(), p) for x, p in zip(x_BSD.chunk(2, 1), positions_BS.chunk(2, 1), strict=True)]
    assert not torch.equal(bits(block(x_BSD, positions_BS)), bits(torch.cat(halves, 1)))


def test_more_dense_layers_than_layers_are_refused() -> None:
    config = model_config(Model(flavor="tiny"))
    assert len(DeepSeekV3(replace(config, num_dense_layers=3)).layers) == 3
    with pytest.raises(CaseError, match="num_layers=3, num_dense_layers=4"):
        replace(config, num_dense_layers=4)
