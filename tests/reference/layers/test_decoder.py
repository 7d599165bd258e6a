"""What every family gets from the shared block and decoder."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from bitproof.harness.case import Model
from bitproof.reference.init import initialize
from bitproof.reference.layers.decoder import Block
from bitproof.reference.layers.feed_forward import FeedForward
from bitproof.reference.layers.moe import MoE, MoEConfig
from bitproof.reference.layers.router import RoutingConfig
from bitproof.reference.models import FAMILIES, build_model


@pytest.fixture(params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> nn.Module:
    model = build_model(Model(family=request.param, flavor="tiny"))
    initialize(model, seed=0)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def test_a_block_adds_attention_and_then_feed_forward_to_its_input() -> None:
    class Tripled(nn.Module):
        def forward(self, x_BSD: Tensor, positions_BS: Tensor, attention_masks: object | None) -> Tensor:
            return 3 * x_BSD

    block = Block(8, Tripled(), FeedForward(8, 16), norm_eps=1e-6)
    x_BSD = torch.full((2, 3, 8), 2.0)
    attended = x_BSD + 3  # twos, normalized, are ones
    expected = attended + block.feed_forward(block.ffn_norm(attended))
    torch.testing.assert_close(block(x_BSD, torch.zeros(2, 3)), expected)


def test_a_block_names_its_experts_moe_and_its_dense_layer_feed_forward() -> None:
    routing = RoutingConfig(num_experts=4, top_k=1, score="softmax")
    moe = MoE(8, MoEConfig(routing=routing, hidden_dim=8, num_shared_experts=0))
    names = ["attention_norm", "attention", "ffn_norm"]
    sparse, dense = (Block(8, nn.Identity(), layer, norm_eps=1e-6) for layer in (moe, FeedForward(8, 16)))
    assert [name for name, _ in sparse.named_children()] == [*names, "moe"]
    assert [name for name, _ in dense.named_children()] == [*names, "feed_forward"]


def test_each_parameter_is_read_once_in_a_forward(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once parameters are sharded, a second read is a second all-gather."""
    owners = {id(module): name for name, module in tiny.named_modules()}
    reads: Counter[str] = Counter()
    ordinary = nn.Module.__getattr__

    def counting(module: nn.Module, name: str) -> object:
        value = ordinary(module, name)
        if isinstance(value, nn.Parameter):
            reads[f"{owners[id(module)]}.{name}"] += 1
        return value

    expected = {name: 1 for name, _ in tiny.named_parameters()}
    monkeypatch.setattr(nn.Module, "__getattr__", counting)
    tiny(torch.zeros(2, 4, dtype=torch.int64), torch.arange(4).repeat(2, 1))
    monkeypatch.undo()
    assert reads == expected


def test_tokens_become_logits_in_the_parameters_dtype(tiny: nn.Module) -> None:
    logits_BSV = tiny(torch.zeros(2, 6, dtype=torch.int64), torch.arange(6).repeat(2, 1))
    assert logits_BSV.shape == (2, 6, 264)
    assert logits_BSV.dtype == torch.bfloat16


def test_a_later_token_does_not_change_an_earlier_logit(tiny: nn.Module) -> None:
    positions_BS = torch.arange(8).repeat(2, 1)
    tokens_BS = torch.arange(16).view(2, 8)
    changed_BS = tokens_BS.clone()
    changed_BS[:, 5] = 99
    before, after = tiny(tokens_BS, positions_BS), tiny(changed_BS, positions_BS)
    assert torch.equal(bits(before[:, :5]), bits(after[:, :5]))
    assert not torch.equal(bits(before[:, 5:]), bits(after[:, 5:]))


def test_a_block_split_along_the_batch_gives_the_whole_ones_bits(tiny: nn.Module) -> None:
    block = tiny.get_submodule("layers.1")
    x_BSD = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    positions_BS = torch.arange(32).repeat(4, 1)
    whole = block(x_BSD, positions_BS)
    (whole_grad,) = torch.autograd.grad(whole, x_BSD, torch.ones_like(whole))
    halves, half_grads = [], []
    for x, positions in zip(x_BSD.chunk(2), positions_BS.chunk(2), strict=True):
        x = x.detach().requires_grad_()
        halves.append(block(x, positions))
        half_grads += torch.autograd.grad(halves[-1], x, torch.ones_like(halves[-1]))
    assert torch.equal(bits(whole), bits(torch.cat(halves)))
    assert torch.equal(bits(whole_grad), bits(torch.cat(half_grads)))
