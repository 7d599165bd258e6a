"""One case of toy systems: how often each system runs, and what a second run that differs makes of the case."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Model, Parallelism
from bitproof.harness.consistency import contradiction
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.execute.transport import open_client
from bitproof.harness.options import RunOptions
from bitproof.harness.records import NO_CALL, CaseResult, Verdict
from tests.harness.execute.test_launch import TOYS, nothing_left_behind, toy, toy_folder

pytestmark = pytest.mark.ranks

RUNS = ["reference first", "candidate first", "reference control", "candidate control"]
CANDIDATES = ("weary", "noisy_once", "noisy_on_one_rank")


@dataclass
class Batch:
    """What each case came to, and the runs that it took."""

    folder: Path
    results: dict[str, CaseResult]
    runs: dict[str, list[str]]

    def error(self, name: str) -> str:
        """What a case's report tells, with its systems' names cut short."""
        return (self.results[name].error or "").replace(TOYS, "")


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("run"), {}

    def on_event(event):
        if event.event == "start":
            role = "reference" if event.system in (f"{TOYS}steady", f"{TOYS}forgetful") else "candidate"
            runs.setdefault(event.case, []).append(f"{role} {event.arm}")

    cases = [toy(name, name=name) for name in CANDIDATES]
    cases += [toy("talkative", name="uneven", reference="forgetful")]
    with nothing_left_behind(tmp_path_factory.mktemp("temporary")):
        found = list(run_cases(cases, RunOptions(device="cpu", timeout=60.0), folder, on_event))
    return Batch(folder, {result.case.name: result for result in found}, runs)


def test_by_default_each_system_runs_twice_even_where_the_first_runs_agree(batch):
    result = batch.results["uneven"]
    assert batch.runs["uneven"] == RUNS
    assert result.compared["grad"] == 8 and not any(result.mismatched.values())
    assert result.seconds.control.keys() == {"reference", "candidate"}
    manifests = (batch.folder / "recordings" / "uneven").glob("*/manifest.json")
    assert sorted(json.loads(path.read_text())["arm"] for path in manifests) == ["control", "control", "first", "first"]


def test_a_second_run_whose_evidence_is_missing_or_extra_makes_the_case_unverified(batch):
    result = batch.results["uneven"]
    assert result.control == {"reference": "UNVERIFIED", "candidate": "UNVERIFIED"}
    assert (result.verdict, batch.error("uneven")) == (
        Verdict.UNVERIFIED,
        "control of reference forgetful: the evidence is incomplete\n"
        "  the candidate lacks 1 record: step 2, rank 1, optimizer weight.moment\n"
        "  no optimizer was compared at step 2, rank 1\n"
        "control of candidate talkative: the evidence is incomplete\n"
        "  the reference lacks 8 records: step 0, rank 0, buffer more; step 1, rank 0, buffer more; "
        "step 2, rank 0, buffer more; step 3, rank 0, buffer more; step 0, rank 1, buffer more; and 3 more",
    )


def test_a_second_run_that_raises_is_an_error_of_its_case(batch):
    result = batch.results["weary"]
    assert (result.verdict, batch.runs["weary"]) == (Verdict.ERROR, RUNS)
    assert batch.error("weary").startswith(
        "RankError: rank 1 of weary raised at step 2\n"
        "  found: ValueError: once was enough\n"
        f"  came from: logs/weary/{toy_folder('weary')}/rank1.control.log\n"
    )


def test_a_difference_that_does_not_come_again_is_reported_where_it_was_recorded(batch):
    result = batch.results["noisy_once"]
    assert (result.verdict, result.control["candidate"]) == (Verdict.NONDETERMINISTIC, "DIFFERENT")
    assert batch.error("noisy_once") == (
        "control of candidate noisy_once: two runs of one system differ, first at step 2, rank 1, loss loss\n"
        "the difference of the candidate from itself did not recur in two replays"
    )
    first = result.first_divergence
    assert (first.step, first.rank, first.kind, first.name) == (2, 1, "loss", "loss")
    assert (first.between, first.call, first.tensor.elements) == ("candidate against itself", None, None)
    assert batch.runs["noisy_once"] == [*RUNS, "candidate replay3", "candidate replay4"]


def test_noise_that_nobody_saw_at_once_is_found_in_the_step_and_on_the_rank_it_came_from(batch):
    result = batch.results["noisy_on_one_rank"]
    first = result.first_divergence
    assert result.verdict == Verdict.NONDETERMINISTIC
    assert (first.step, first.rank, first.kind, first.name) == (2, 1, "loss", "loss")
    assert first.between == "candidate against itself"
    assert (first.call.operator, first.call.ranks) == ("mul.Tensor", "1")
    assert first.call.how.startswith("has the same inputs and a different output, with other=")
    assert first.call.source.startswith("tests/harness/toy_systems.py:")
    assert (first.call.output.elements, first.tensor.elements) == (6, 1)
    assert first.call.output.elements_differing == 6 and first.call.output.max_ulp > 0
    assert first.call.output.reference_bits != first.call.output.candidate_bits
    assert batch.error("noisy_on_one_rank") == (
        "control of candidate noisy_on_one_rank: two runs of one system differ, first at step 2, rank 1, loss loss\n"
        "noise is new at each run: two replays first differ at step 2, rank 1, loss loss; "
        "the call to blame is in step 1"
    )
    assert batch.runs["noisy_on_one_rank"] == [*RUNS, *(f"candidate replay{number}" for number in (3, 4, 5, 6))]


def test_what_replays_leave_is_removed_once_the_cause_is_found(batch):
    assert not list(batch.folder.rglob("*.zip"))


def watched(case, folder, *, logs_calls=False, **options):
    """A case's result, and the runs that it took."""
    options, arms = RunOptions(device="cpu", timeout=60.0, **options), []

    def on_event(event):
        arms.extend([event.arm] if event.event == "start" else [])

    with open_client([case], folder, options) as client:
        run = CaseRun(case, client.place(case), client, options, on_event, logs_calls=logs_calls)
        found = run.result()
        assert not list(client.work.rglob("*.zip")), "what a search needs is removed once it has ended"
    return found, arms


def test_second_runs_of_a_search_show_as_much_of_a_difference_as_replays_do(tmp_path, one_host):
    replayed, arms = watched(toy("one_bit_off"), tmp_path / "a", control="when_different", verify=False)
    assert arms == ["first"] * 2 + ["control"] * 2 + ["replay1"] * 2
    for control in ("up_to_difference", "logged"):
        logged, arms = watched(toy("one_bit_off"), tmp_path / control, control=control, verify=False)
        assert arms == ["first"] * 2 + ["control"] * 2
        assert logged.first_divergence == replayed.first_divergence
    assert (logged.first_divergence.call.operator, logged.first_divergence.tensor.max_ulp) == ("bitwise_xor_.Scalar", 1)


def test_first_runs_that_log_their_step_show_the_call_and_no_bits(tmp_path, one_host):
    case, fault = replace(toy(), steps=1), "flip-bit:rank=1,step=0,grad=weight"
    replayed, arms = watched(case, tmp_path / "a", control="never", inject=fault, verify=False)
    assert arms == ["first"] * 2 + ["replay1"] * 2
    logged, arms = watched(case, tmp_path / "b", control="never", inject=fault, logs_calls=True)
    assert arms == ["first"] * 2
    call, tensor = replayed.first_divergence.call, replayed.first_divergence.tensor
    assert (call.operator, tensor.elements_differing) == ("bitwise_xor_.Scalar", 1)
    assert logged.first_divergence.call == replace(call, output=None)
    assert (logged.first_divergence.tensor.max_ulp, logged.first_divergence.tensor.samples) == (None, None)


def test_where_calls_cannot_be_logged_second_runs_are_made_without(tmp_path, one_host):
    found, arms = watched(toy("shy"), tmp_path, control="up_to_difference")
    assert (found.verdict, found.control) == (Verdict.DIFFERENT, {"reference": "EQUAL", "candidate": "EQUAL"})
    assert arms == ["first"] * 2 + ["control"] * 3 + ["replay1"] * 2
    assert re.fullmatch(
        f"a second run of candidate {TOYS}shy failed while its calls were logged, and was made again without: "
        rf"rank \d of {TOYS}shy raised at step 2",
        found.remarks[-1],
    )
    text = "a replay that looks for the cause failed; the verdict stands:"
    assert text in found.error and "somebody is looking" in found.error


def test_finding_the_cause_has_a_time_of_its_own_and_the_verdict_stands_where_that_is_short(tmp_path, one_host):
    found, arms = watched(toy("slow_when_watched"), tmp_path, control="never", explain_timeout=1.0)
    assert (found.verdict, found.first_divergence.name, set(arms[2:])) == (Verdict.DIFFERENT, "weight", {"replay1"})
    assert "the verdict stands:\nRankError: finding the cause took longer than 1 s" in found.error
    assert "fix: give a longer --explain-timeout" in found.error


def test_of_an_equal_case_every_call_is_compared_and_one_that_the_reference_never_made_counts(tmp_path, one_host):
    options = RunOptions(device="cpu", control="never", every_call=True)
    [found] = run_cases([toy("secretive")], options, tmp_path)
    assert (found.verdict, found.differing_kinds) == (Verdict.DIFFERENT, ("activation",))
    assert contradiction(found) is None and found.mismatched["activation"] == 1 < found.compared["activation"]
    first = found.first_divergence
    assert (first.step, first.rank, first.kind, first.call.operator) == (2, 1, "activation", "mul.Tensor")
    assert re.fullmatch(r"mul.Tensor of the step itself \(update\), call \d+", first.name)
    assert first.call.how == "has an output that is nowhere in the reference" and first.call.ranks == "1"
    assert found.sums_over_ranks == {}, "groups of a user's system are its own"


@pytest.mark.slow
def test_every_call_of_a_graph_with_experts_is_one_of_eager_s(tmp_path, one_host):
    """Its graph reads how many rows each rank gets by operators; eager reads them as a list, by none."""
    case = replace(
        CASES["moe_seq"], model=Model(layers=1, dense_layers=0), parallelism=Parallelism(world_size=2), steps=1
    )
    [found] = run_cases([case], RunOptions(device="cpu", control="never", every_call=True), tmp_path)
    assert (found.verdict, found.error, found.mismatched["activation"]) == (Verdict.EQUAL, None, 0)
    assert found.compared["activation"] > 100
    assert found.sums_over_ranks == dict.fromkeys(("reference", "candidate"), "in rank order by additions")


def test_where_no_call_explains_a_difference_that_is_said(tmp_path, one_host):
    options = RunOptions(device="cpu", control="never")
    [unseen] = run_cases([toy("unseen", name="unseen")], options, tmp_path)
    first = unseen.first_divergence
    assert (unseen.verdict, first.step, first.rank, first.kind, first.call) == (Verdict.DIFFERENT, 2, 1, "param", None)
    assert list(unseen.remarks) == [NO_CALL]
