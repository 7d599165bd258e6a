"""What eager shows at module boundaries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitproof.harness.case import Chunking
from bitproof.harness.errors import CaseError
from bitproof.reference.chunking import chunk_modules
from bitproof.reference.observed_activations import Activations


class Doubled(nn.Module):
    def forward(self, x_BSD):
        return x_BSD * 2


class Pair(nn.Module):
    def forward(self, x_BSD):
        return x_BSD + 1, x_BSD.argmax(-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice = Doubled()
        self.pair = Pair()

    def forward(self, x_BSD):
        y_BSD, _ = self.pair(self.twice(self.twice(x_BSD)))
        return y_BSD


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        self.idle = Doubled()

    def forward(self, x_BSD):
        return self.layers[0](x_BSD)


def shown(model, patterns, x=None, backward=True):
    seen = []
    x = torch.ones(2, 4, 3, requires_grad=True) if x is None else x
    with Activations(model, patterns).shown_to(lambda kind, name, value: seen.append((kind, name, value.clone()))):
        loss = model(x).sum()
        if backward:
            torch.autograd.grad(loss, x, torch.full_like(loss, 0.5))
    model(x)  # nobody looks any more
    return seen


def test_what_a_module_returns_is_shown_and_then_its_gradient():
    seen = shown(Model(), ["layers.*"])
    assert [(kind, name) for kind, name, _ in seen] == [
        ("activation", "layers.0@forward"),
        ("activation", "layers.0@backward"),
    ]
    assert torch.equal(seen[0][2], torch.full((2, 4, 3), 5.0))
    assert torch.equal(seen[1][2], torch.full((2, 4, 3), 0.5))


def test_each_call_and_each_tensor_returned_has_a_name_and_integers_have_no_gradient():
    names = [name for _, name, _ in shown(Model(), ["layers.*.*"])]
    assert names == [
        "layers.0.twice@forward",
        "layers.0.twice@forward.call1",
        "layers.0.pair@forward.output0",
        "layers.0.pair@forward.output1",
        "layers.0.pair@backward.output0",
        "layers.0.twice@backward.call1",
        "layers.0.twice@backward",
    ]


def test_a_module_in_a_chunked_one_is_shown_once_a_chunk_and_the_chunked_one_whole():
    model = Model()
    chunk_modules(model, Chunking(dim="batch", modules="layers.*"))
    seen = {name: value for _, name, value in shown(model, ["layers.*", "layers.*.pair"])}
    assert list(seen) == [
        "layers.0.pair@forward.output0.chunk0",
        "layers.0.pair@forward.output1.chunk0",
        "layers.0.pair@forward.output0.chunk1",
        "layers.0.pair@forward.output1.chunk1",
        "layers.0@forward",
        "layers.0@backward",
        "layers.0.pair@backward.output0.chunk1",
        "layers.0.pair@backward.output0.chunk0",
    ]
    assert seen["layers.0@forward"].shape == (2, 4, 3)
    assert seen["layers.0.pair@backward.output0.chunk0"].shape == (1, 4, 3)


def test_without_patterns_nothing_is_shown_and_a_pattern_that_fits_nothing_is_refused():
    assert shown(Model(), []) == []
    assert shown(Model(), ["idle"]) == []
    with pytest.raises(CaseError, match="'busy' of what to observe matches no module"):
        Activations(Model(), ["busy"])
