"""Operators over lists of tensors, against torch's own way through them."""

import pytest
import torch

from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from bitproof.harness.powers.proofs.prover.programs.one_by_one import FUNCTIONS, one_by_one
from tests.harness.powers.proofs.toy_graphs import randn

X = randn(4, 6)
ELEMENTWISE = {
    "lerp": ([X, X + 1], [X * 2, X * 3], 0.3),
    "addcmul": ([X, X + 1], [X * 2, X * 3], [X, X], 0.3),
    "addcdiv": ([X, X + 1], [X * 2, X * 3], [X.exp(), X.exp()], [0.3, 0.7]),
    "copy_": ([X, X + 1], [X * 2, X * 3]),
} | dict.fromkeys(("sqrt", "neg", "reciprocal", "abs", "sign", "norm", "zero_"), ([X, X + 1],))


@pytest.mark.parametrize("name", sorted({*FUNCTIONS}))
def test_operators_over_lists_have_the_bits_of_single_ones_on_the_cpu(name):
    given = ELEMENTWISE.get(name, ELEMENTWISE.get(name.removesuffix("_"), ([X, X + 1], [0.3, 1.7])))
    operator = getattr(torch, f"_foreach_{name}")
    found = []
    for mode in (torch.no_grad(), one_by_one()):
        own = [[x.clone() if isinstance(x, torch.Tensor) else x for x in given[0]], *given[1:]]
        with mode:
            results = operator(*own)
        found.append(own[0] if name.endswith("_") else results)
    assert all(same_bits(x, y) for x, y in zip(*found, strict=True))
