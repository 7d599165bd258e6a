"""Sums in an order of chance, in one expert on one rank, make a real case NONDETERMINISTIC, and are found.

tests/harness/localize/test_defects.py finds those of the graph; here both systems have them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.builtin_cases.chunking import moe_seq
from bitproof.harness.case import Parallelism
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import CaseResult, Divergence, Verdict
from tests.harness.localize.defects import EXPERTS
from tests.harness.localize.noisy import NOISY_RANK
from tests.small import small

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

NOISY = "tests.harness.localize.noisy"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> CaseResult:
    case = replace(small(moe_seq, layers=2), reference=f"{NOISY}:eager", steps=1, parallelism=Parallelism(world_size=2))
    options = RunOptions(device="cpu", timeout=120.0, extra_passes=(f"{NOISY}:add_noise",))
    [result] = run_cases([case], options, tmp_path_factory.mktemp("run"))
    return result


@pytest.fixture
def first(result: CaseResult) -> Divergence:
    assert result.first_divergence is not None, result.error
    return result.first_divergence


def test_noise_in_eager_and_in_the_graph_shows_in_both_controls(result: CaseResult) -> None:
    assert result.verdict == Verdict.NONDETERMINISTIC
    assert result.control == {"reference": "DIFFERENT", "candidate": "DIFFERENT"}
    systems = [f"reference {NOISY}:eager", "candidate graph"]
    where = "two runs of one system differ, first at step 0, rank 0, loss loss"
    assert result.error == "\n".join(f"control of {system}: {where}" for system in systems)


def test_the_noisy_call_is_blamed_on_its_rank_though_its_rows_reach_all(first: Divergence) -> None:
    assert (first.between, first.step, first.rank, first.name) == ("reference against itself", 0, 0, "loss")
    assert (first.call.operator, first.call.module, first.call.direction) == ("sum_in_any_order", EXPERTS, "forward")
    assert first.call.how == "has the same inputs and a different output"
    assert (first.call.rank, first.call.ranks) == (NOISY_RANK, str(NOISY_RANK))
    assert first.call.source is not None and "localize/noisy.py:" in first.call.source


def test_two_more_replays_show_how_far_the_outputs_of_the_noisy_call_lie_apart(first: Divergence) -> None:
    assert first.call.output.elements is not None and first.call.output.elements_differing is not None
    assert 0 < first.call.output.elements_differing < first.call.output.elements, "one expert's rows alone"
    assert first.call.output.max_ulp is not None and 0 < first.call.output.max_ulp < 100
    assert first.call.output.reference_bits != first.call.output.candidate_bits
