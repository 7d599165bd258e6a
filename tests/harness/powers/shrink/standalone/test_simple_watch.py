"""The `watch` of files without bitproof shows the bits that bitproof's own shows, under the same names."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import bitproof
from bitproof.harness.powers.shrink.standalone import simple_watch


def shown(watch, form, wrap=lambda model: model):
    """What two steps of a trainer show, made by one `watch`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(index):
        loss = wrap(model)(torch.randn(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def train():
        for index in range(100):
            step(index)

    found = {}

    def keep(index, kind, name, tensor):
        found[index, kind, name] = tensor.detach().clone()

    if form == "step":
        made = watch(step, model=wrap(model), optimizer=optimizer)
        for index in range(2):
            made.step(index, partial(keep, index))
    else:
        made = watch(train=train, model=wrap(model), optimizer=optimizer if form == "train" else None)
        made.take_steps(2, lambda index: nullcontext(partial(keep, index)))
    return found


@pytest.mark.parametrize("form", ["step", "train", "train without its optimizer"])
def test_it_shows_the_bits_that_the_other_shows(form):
    simple, full = shown(simple_watch.watch, form), shown(bitproof.watch, form)
    left_out = {name for _, _, name in full.keys() - simple.keys()}
    assert left_out <= {"loss", *(name for name in left_out if name.endswith("@before_optimizer"))}
    assert {kind for _, kind, _ in simple} >= {"grad", "buffer", "param", "optimizer"}
    for name, tensor in simple.items():
        assert torch.equal(tensor.double(), full[name].double()), name


def test_names_are_those_of_the_bare_model():
    compiled = shown(simple_watch.watch, "step", lambda model: torch.compile(model, backend="eager"))
    assert compiled.keys() == shown(simple_watch.watch, "step").keys()
