"""Batch norms in training: what they give, what they write, and which of them are refused. Draws into memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from bitproof.harness.powers.proofs.prover.graphs import admitted
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.known_operators import OVERWRITES
from tests.harness.powers.proofs.toy_graphs import aten, compare, randn, verdict

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lacks", [(), ("input",), ("weight", "bias"), ("running_mean", "running_var")])
def test_a_batch_norm_is_admitted_only_where_its_results_have_the_dtypes_of_its_fakes(dtype, lacks):
    """Fakes of 16-bit inputs beside parameters in float32 have 16-bit statistics, and results do not."""
    given = {"input": X, "weight": X[0], "bias": X[1], "running_mean": MEAN, "running_var": VAR}
    given = {name: x.clone() if name in lacks else x.to(dtype) for name, x in given.items()}
    given |= {"training": True, "momentum": 0.1, "eps": 1e-5}
    reported = 0
    for op in (aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional):
        with FakeTensorMode() as mode:
            fakes = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
            fake = op.default(**fakes)
        if admitted.why_not(op.default, given) is None:
            found = op.default(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()})
            assert [x.dtype for x in found] == [x.dtype for x in fake]
            reported += 1
    is_one = not lacks or dtype is torch.float32
    assert reported == (0 if not is_one else 3 if dtype in (torch.float32, torch.float64) else 2)


DRAWS = {
    "bernoulli_.Tensor": lambda y: aten.bernoulli_.Tensor(y, torch.full(y.shape, 0.3)),
    "bernoulli_.float": lambda y: aten.bernoulli_.float(y, 0.3),
    "exponential_.default": aten.exponential_.default,
    "log_normal_.default": aten.log_normal_.default,
    "normal_.default": aten.normal_.default,
    "uniform_.default": aten.uniform_.default,
}


def test_every_operator_that_overwrites_is_tried():
    assert {f"aten.{name}" for name in DRAWS} == OVERWRITES


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lie", [lambda y: y, lambda y: y.t(), lambda y: y[:, ::2], lambda y: y[1, 3]])
def test_a_draw_into_memory_reads_nothing_of_it(name, dtype, lie):
    found = []
    for held in (torch.zeros(4, 6), torch.full((4, 6), torch.nan), torch.full((4, 6), -torch.inf), X):
        memory = held.to(dtype).clone()
        part = lie(memory)
        torch.manual_seed(0)
        DRAWS[name](part)
        found.append(part.clone())
    assert all(same_bits(found[0], x) for x in found)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_into_memory_that_nobody_wrote_is_equal_to_itself_and_to_no_other(name):
    def step(w, x, draw=DRAWS[name], memory=torch.empty_like):
        return draw(memory(x)) * x * w[0]

    def late(w, x):
        torch.rand_like(x)
        return step(w, x)

    assert verdict(step, step, W, X) == "PROVED"
    assert verdict(step, lambda w, x: step(w, x, memory=torch.clone), W, X) == "PROVED"
    assert verdict(step, late, W, X) == "NOT PROVED"
    assert verdict(step, lambda w, x: step(w, x, memory=lambda y: torch.empty(6, 4).t()), W, X) == "NOT PROVED"
    assert (
        verdict(lambda w, x: torch.empty_like(x) * w[0], lambda w, x: torch.empty_like(x) * w[0], W, X) == "NOT PROVED"
    )
