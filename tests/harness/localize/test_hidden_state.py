"""State that nobody shows: it is remarked on, and blame reaches through it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import CaseResult, Verdict

SYSTEMS = Path(__file__).with_name("hidden_state.py")
REMARK = (
    f"{{}} {SYSTEMS}:{{}} keeps state that steps change and that it does not show: buffer 0.counts; "
    "a difference there is seen once it reaches what is shown"
)


def result_of(candidate: str, folder: Path, reference: str = "right", systems: Path = SYSTEMS) -> CaseResult:
    case = Case(
        name=candidate,
        family="hidden",
        reference=f"{systems}:{reference}",
        candidate=f"{systems}:{candidate}",
        steps=3,
        parallelism=Parallelism(world_size=2, ep=1),
    )
    [result] = run_cases([case], RunOptions(device="cpu", timeout=60.0, control="never"), folder)
    return result


@pytest.mark.ranks
def test_generators_that_steps_draw_from_are_compared_and_state_that_nobody_shows_is_remarked_on(tmp_path, one_host):
    result = result_of("right", tmp_path)
    assert result.verdict == Verdict.EQUAL and result.compared["rng"] == 6
    assert list(result.remarks[:2]) == [REMARK.format(role, "right") for role in ("reference", "candidate")]


@pytest.mark.ranks
def test_a_mask_that_differs_is_led_back_to_the_number_that_was_drawn_before_it(tmp_path, one_host):
    first = result_of("drawn", tmp_path).first_divergence
    assert first is not None and first.call is not None and (first.step, first.rank, first.kind) == (1, 1, "loss")
    assert (first.call.operator, first.call.rank) == ("rand", 1)
    assert first.call.how == "is an extra call that the reference does not have"


@pytest.mark.ranks
def test_what_an_earlier_step_left_is_blamed_on_the_call_that_left_it(tmp_path, one_host):
    result = result_of("left", tmp_path)
    first = result.first_divergence
    assert first is not None and first.call is not None and (first.step, first.rank) == (2, 1)
    assert (first.call.operator, first.call.rank) == ("add_.Tensor", 1)
    assert "the call to blame is in step 0: step 2 reads its output" in result.remarks


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("candidate", "operator", "how"),
    [
        (
            "biased",
            "mul.Tensor",
            "has the same inputs and a different output, with other=0.2 where the reference has 0.05",
        ),
        ("counts_its_own", "allreduce_", "is missing from the candidate"),
    ],
)
def test_an_expert_bias_that_nobody_shows_is_led_back_to_what_changed_it(tmp_path, one_host, candidate, operator, how):
    result = result_of(candidate, tmp_path, "balanced")
    first = result.first_divergence
    assert first is not None and first.call is not None and first.kind == "loss"
    assert (first.call.operator, first.call.how, first.call.direction) == (operator, how, "update")
    assert f"the call to blame is in step 0: step {first.step} reads its output" in result.remarks


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("candidate", "verdict", "rank"),
    [("leaves_out", Verdict.UNVERIFIED, 0), ("leaves_out_on_rank_1", Verdict.DIFFERENT, 1)],
)
def test_a_parameter_without_state_is_led_to_the_list_that_lacks_it(tmp_path, one_host, candidate, verdict, rank):
    """What is missing is no evidence, and the parameter itself differs; state on fewer ranks is no other layout."""
    result = result_of(candidate, tmp_path, "listed")
    first = result.first_divergence
    assert result.verdict == verdict and first is not None and (first.kind, first.name) == ("param", "2.weight")
    assert first.call is not None and (first.call.operator, first.call.rank) == ("_foreach_mul_.Scalar", rank)
    assert first.call.how == ("is missing from the candidate, with 6 of the reference's 8 tensors in its lists")
    assert not any(reported.startswith("no call is blamed") for reported in result.remarks)


@pytest.mark.ranks
def test_a_graph_of_a_foreign_trainer_that_lacks_a_wait_ends_with_the_collective_s_name(tmp_path, one_host):
    """Whether values are there in time is luck, in each run anew: in those that find a cause, too."""
    result = result_of("lacks_a_wait", tmp_path, "waits", SYSTEMS.with_name("graph_without_a_wait.py"))
    first = result.first_divergence
    assert result.verdict in (Verdict.DIFFERENT, Verdict.NONDETERMINISTIC, Verdict.UNVERIFIED)
    if first is None:
        assert "races with its collectives" in str(result.error) and "all_reduce_1" in str(result.error)
    elif first.call is None:
        assert any("a graph races" in remark and "all_reduce_1" in remark for remark in result.remarks)
    else:
        assert (first.call.operator, first.call.how) == ("all_reduce", "is launched, and never waited for")
        assert first.call.node == "all_reduce_1"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way", "verdict", "operator"),
    [("works", Verdict.NONDETERMINISTIC, "allreduce_"), ("functions", Verdict.DIFFERENT, "all_reduce")],
)
def test_an_exchange_of_a_foreign_trainer_that_nobody_waits_for_is_named(tmp_path, one_host, way, verdict, operator):
    """Replays wait for each work at once, so they do not repeat what was recorded of works."""
    result = result_of(way, tmp_path, f"{way}__waits", SYSTEMS.with_name("exchange_without_a_wait.py"))
    first = result.first_divergence
    assert result.verdict == verdict, result.error
    assert first is not None and first.call is not None and (first.kind, first.name) == ("grad", "2.weight")
    assert (first.call.operator, first.call.how) == (operator, "is launched, and never waited for")
