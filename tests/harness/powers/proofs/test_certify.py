from dataclasses import replace

import pytest
import torch

from bitproof.harness.certificate_checker import RejectedError
from bitproof.harness.powers.proofs.prover.certify import certificate_of
from tests.harness.certificate.samples import check
from tests.harness.powers.proofs.toy_graphs import compare, randn

W, X = randn(4, 6), randn(4, 6)


def test_a_certificate_holds_no_step_that_nobody_needs():
    half_joins = lambda w, x: torch.cat([w[:2] * x[:2], w[2:] * x[1:3]])  # noqa: E731
    proof = compare(half_joins, half_joins, W, X)
    found = certificate_of("half joins", proof)
    assert len(found.steps) < len(proof.table.steps)
    assert check(found) == {"PROVED": 1}
    for place in range(len(found.steps)):  # none can be missed
        with pytest.raises(RejectedError):
            check(replace(found, steps=found.steps[:place] + found.steps[place + 1 :]))


def test_steps_stand_in_an_order_in_which_each_rests_on_earlier_ones():
    proof = compare(lambda w, x: (w + x).exp(), lambda w, x: (x + w).exp(), W, X)
    found = certificate_of("swapped", proof)
    assert [step.rule for step in found.steps] == ["", "", "", "", "exact_in_order"]
    assert [step.equals for step in found.steps] == [0, 1, 2, 3, 2]
