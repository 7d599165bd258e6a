"""No mutant is proved equal where a bit differs. `tests/benchmarks/fuzz_prove.py` runs thousands, and counts."""

import random

import pytest

from tests.harness.powers.proofs.fuzzing import Fuzzer
from tests.harness.powers.proofs.mutants import MUTATIONS


@pytest.fixture(scope="module")
def fuzzer():
    return Fuzzer()


def test_each_step_itself_is_proved(fuzzer):
    for subject in fuzzer.subjects:
        answers = subject.prove(subject.module)
        assert [(answer.output, answer.verdict) for answer in answers] == [
            ("first", "PROVED"),
            ("second", "PROVED"),
            ("written buffer counts", "PROVED"),
        ]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_proved_of_a_mutant_has_equal_bits(fuzzer, seed):
    chance = random.Random(seed)
    for _ in range(10):
        outcome = fuzzer.try_one(chance)
        assert outcome.unsound == [], f"{outcome.kind}: {outcome.unsound} are proved, and differ"


def test_every_mutation_applies_somewhere(fuzzer):
    chance = random.Random(0)
    calls = [
        (subject, node.name)
        for subject in fuzzer.subjects
        for node in subject.module.graph.nodes
        if node.op == "call_function"
    ]
    for name, mutation in MUTATIONS.items():
        assert any(subject.applies(mutation, chance, call) for subject, call in calls), name
