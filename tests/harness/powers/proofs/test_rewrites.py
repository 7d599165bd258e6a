"""Random programs of operators that trace, changed: `tests/benchmarks/fuzz_operators.py` tries many."""

import random

import torch

from bitproof.harness.powers.proofs.prover import answers, rules
from tests.harness.powers.proofs.fuzzing import Subject, random_subject
from tests.harness.powers.proofs.random_programs import operators
from tests.harness.powers.proofs.rewrites import BREAKS, KEEPS
from tests.harness.powers.proofs.toy_graphs import GROUPS, aten, trace

W = torch.tensor([[1.0, -1.0, 0.0], [2.0, 1.0, -0.0]])


def subject(step, mutations):
    return Subject(
        module=trace(step, [W, W.flip(0)]),
        names=("parameter w", "input x"),
        outputs=["out 0"],
        groups=GROUPS,
        like=[W, W.flip(0)],
        inputs=[[[W, W.flip(0)]]],
        must_read=(),
        mutations=mutations,
    )


def test_each_change_that_keeps_every_bit_is_proved_where_it_can_be_made():
    step = lambda w, x: ((w * x - x) * 2.0).exp()  # noqa: E731
    for name, change in KEEPS.items():
        chance = random.Random(name)
        outcomes = [subject(step, {name: change}).try_one(chance) for _ in range(4)]
        assert [(x.unsound, x.flagged, x.proved) for x in outcomes] == [([], [], ["out 0"])] * 4, name


def test_no_change_that_loses_a_bit_is_proved():
    def step(w, x):
        y = (w - x).clone()
        y.mul_(x)
        z = x.exp()
        return y + z

    for name, change in BREAKS.items():
        chance = random.Random(name)
        assert not any(subject(step, {name: change}).try_one(chance).unsound for _ in range(4)), name


def test_a_rule_that_loses_the_sign_of_a_zero_is_found(monkeypatch):
    def exact_of_zero(table, term):
        """Unsound: x + 0.0 is x."""
        return next(
            (x for x in term[4] if term[1] == "add" and {table.number(y) for y in term[4]} == {None, 0.0}), None
        )

    step = lambda w, x: aten.neg.default(w.abs() * 0.0) * torch.ones_like(x)  # noqa: E731
    broken = rules.RULES | {"exact": [exact_of_zero, *rules.RULES["exact"]]}
    own = subject(step, {"plus_zero": BREAKS["plus_zero"]})
    assert not any(own.try_one(random.Random(seed)).unsound for seed in range(5))
    monkeypatch.setattr(answers, "RULES", broken)
    assert any(own.try_one(random.Random(seed)).unsound for seed in range(5))


def test_random_programs_have_operators_of_many_kinds_and_their_mutants_prove_nothing_wrong():
    table, admitted, writes, draws = operators()
    assert (len(table) > 100, len(admitted) > 700, len(writes), len(draws)) == (True, True, 7, 5)
    tried = []
    for seed in range(12):
        chance = random.Random(seed)
        try:
            own = random_subject(chance)
        except Exception:  # a program that is refused as a whole
            continue
        tried += [own.try_one(chance) for _ in range(4)]
    assert len(tried) > 20
    assert not any(outcome.unsound for outcome in tried)
    assert sum(len(outcome.proved) for outcome in tried) > 20
