"""No mutant is proved equal where a bit differs. `tests/benchmarks/fuzz_prove.py` runs thousands, and counts."""

import random

import pytest

from tests.harness.prove.fuzzing import Fuzzer
from tests.harness.prove.mutants import MUTATIONS


@pytest.fixture(scope="module")
def fuzzer():
    return Fuzzer()


def test_the_graph_itself_is_proved(fuzzer):
    assert {answer.verdict for answer in fuzzer.prove(fuzzer.module)} == {"PROVED"}


@pytest.mark.parametrize("seed", range(4))
def test_what_is_proved_of_a_mutant_has_equal_bits(fuzzer, seed):
    chance = random.Random(seed)
    for _ in range(10):
        outcome = fuzzer.try_one(chance)
        assert outcome.unsound == [], f"{outcome.kind}: {outcome.unsound} are proved, and differ"


def test_every_mutation_applies_somewhere(fuzzer):
    chance = random.Random(0)
    calls = [node.name for node in fuzzer.module.graph.nodes if node.op == "call_function"]
    for name, mutation in MUTATIONS.items():
        assert any(fuzzer.applies(mutation, chance, call) for call in calls), name
