"""A buffer that only one side registers, in trainers that run: what the verdict is, and what is blamed."""

from __future__ import annotations

import pytest

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import CaseResult, Verdict
from tests.hosts import one_host

pytestmark = pytest.mark.ranks

SIDES = "tests.harness.execute.buffered"
PAIRS = {
    "constant": ("plain", "constant"),
    "persistent": ("plain", "persistent"),
    "lost": ("constant", "plain"),
    "shifted": ("plain", "shifted"),
    "both_shifted": ("constant", "shifted"),
    "unwritten": ("plain", "unwritten"),
    "counting": ("plain", "counting"),
    "counting_faster": ("plain", "counting_faster"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, CaseResult]:
    cases = [
        Case(
            name=name,
            family="buffers",
            reference=f"{SIDES}:{reference}",
            candidate=f"{SIDES}:{candidate}",
            steps=2,
            parallelism=Parallelism(world_size=2, ep=1),
        )
        for name, (reference, candidate) in PAIRS.items()
    ]
    with one_host():
        options = RunOptions(device="cpu", control="when_different", verify=False)
        results = run_cases(cases, options, tmp_path_factory.mktemp("run"))
        return {result.case.name: result for result in results}


@pytest.mark.parametrize(
    ("name", "side"), [("constant", "candidate"), ("persistent", "candidate"), ("lost", "reference")]
)
def test_a_constant_that_became_a_buffer_is_a_remark_beside_equal(runs, name, side):
    result = runs[name]
    assert (result.verdict, result.error) == (Verdict.EQUAL, None)
    assert any(remark.startswith(f"only the {side} has buffer `positions`") for remark in result.remarks)


def test_other_positions_are_blamed_on_the_lookup_that_reads_them_and_not_on_the_broadcast(runs):
    result = runs["shifted"]
    assert (result.verdict, result.error) == (Verdict.DIFFERENT, None)
    call = result.first_divergence.call
    assert (call.operator, call.module) == ("embedding", "pos")
    assert any(remark.startswith("only the candidate has buffer `positions`") for remark in result.remarks)
    assert "the call to blame reads buffer `positions`, which only the candidate has" in result.remarks


def test_a_buffer_that_nobody_wrote_is_named(runs):
    result = runs["unwritten"]
    assert result.verdict == Verdict.DIFFERENT
    assert "broadcast" not in result.first_divergence.call.operator
    text = "the call to blame reads buffer `scale`, which differed before the step's first forward"
    assert text in result.remarks


def test_a_buffer_of_both_sides_that_differs_from_the_start_is_not_blamed_on_the_broadcast(runs):
    result = runs["both_shifted"]
    assert result.verdict == Verdict.DIFFERENT
    assert "broadcast" not in result.first_divergence.call.operator
    text = "the call to blame reads buffer `positions`, which differed before the step's first forward"
    assert text in result.remarks


def test_state_that_only_one_side_keeps_leaves_nothing_said_but_what_differs(runs):
    assert runs["counting"].verdict == Verdict.UNVERIFIED
    assert "only the candidate has buffer `count`, and steps change it" in runs["counting"].error
    assert runs["counting_faster"].verdict == Verdict.DIFFERENT
    assert runs["counting_faster"].first_divergence.call.operator.startswith("add_")
