"""Batch norms in training: what they give, what they write, and which of them are refused."""

import pytest
import torch

from bitproof.harness.prove.evaluate import same_bits
from bitproof.harness.prove.graphs.export import RefusedError
from tests.harness.prove.toy_graphs import aten, compare, randn

W, X, MEAN, VAR = randn(6, 6), randn(4, 6), torch.zeros(6), torch.ones(6)


def normed(w, x, mean, var, *, momentum=0.1, training=True, lie=lambda y: y):
    """A product, normalized over its rows, which the statistics count."""
    y = torch.nn.functional.batch_norm(lie(x @ w), mean, var, x[0], None, training, momentum)
    return y.sum(0), mean * 1.5 + w[0]


def test_a_batch_norm_in_training_is_what_it_gives_and_two_copies_into_its_statistics():
    proof = compare(normed, normed, W, X, MEAN, VAR, must_read=("parameter ",))
    assert {answer.output: answer.verdict for answer in proof.answers} == {
        "out 0": "PROVED",
        "out 1": "PROVED",
        "written input 1": "PROVED",
        "written input 2": "PROVED",
    }
    calls = proof.sides[0].graph.calls
    assert [call.writes for call in calls if call.op == "aten.copy_.default"] == [("self",)] * 2
    norms = aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional
    given = [[MEAN.clone(), VAR.clone()] for _ in norms]
    found = [norm.default(X, W[0], W[1], *own, True, 0.1, 1e-5) for norm, own in zip(norms, given, strict=True)]
    values = [[*several[:3], *(several[3:] or own)] for several, own in zip(found, given, strict=True)]
    assert all(same_bits(x, y) for other in values[1:] for x, y in zip(values[0], other, strict=True))
    assert not same_bits(values[0][3], MEAN)


def test_a_batch_norm_that_counts_by_another_share_is_not_proved():
    proof = compare(normed, lambda *args: normed(*args, momentum=0.2), W, X, MEAN, VAR, must_read=("parameter ",))
    assert {answer.verdict for answer in proof.answers} == {"NOT PROVED"}


def test_statistics_are_other_before_the_batch_norm_that_counts():
    def early(w, x, mean, var):
        before = mean * 1.5 + w[0]
        return normed(w, x, mean, var)[0], before

    proof = compare(normed, early, W, X, MEAN, VAR, must_read=("parameter ",))
    assert {answer.output for answer in proof.answers if answer.verdict != "PROVED"} == {"out 1"}


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x, mean, var: normed(w, x, mean, mean),
        lambda w, x, mean, var: normed(w, x, mean, var, lie=lambda y: y.t().contiguous().t()),
        lambda w, x, mean, var: normed(w, x, x[1], var),
        lambda w, x, mean, var: normed(w, x, mean, var, training=False),
    ],
)
def test_a_batch_norm_of_one_memory_of_columns_of_other_sizes_or_that_does_not_count_is_refused(step):
    with pytest.raises(RefusedError, match="native_batch_norm"):
        compare(step, step, W, X, MEAN, VAR)
