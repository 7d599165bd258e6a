"""The example's Muon, on one rank: what it orthogonalizes, and what a wrong momentum would change."""

import torch
from torch import nn

from bitproof.builtin_cases.examples.optimizer_loop import LR, MOMENTUM, Muon, orthogonal


def test_singular_values_are_drawn_near_one_in_tall_and_wide_matrices():
    generator = torch.Generator().manual_seed(0)
    for shape in ((24, 64), (64, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=generator)))
        assert values.min() > 0.5 and values.max() < 1.3


def test_hidden_matrices_take_an_orthogonal_step_and_all_else_takes_its_momentum():
    model = nn.ModuleDict({"blocks": nn.Linear(4, 6), "output": nn.Linear(4, 6, bias=False)})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    grads = {name: torch.randn_like(parameter) for name, parameter in before.items()}
    optimizer = Muon(model, LR)
    for _ in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = grads[name]
        optimizer.step()
    for name, parameter in model.named_parameters():
        second = MOMENTUM * grads[name] + grads[name]
        made = (orthogonal(grads[name]), orthogonal(second)) if name == "blocks.weight" else (grads[name], second)
        torch.testing.assert_close(parameter.detach(), before[name] - LR * made[0] - LR * made[1])
