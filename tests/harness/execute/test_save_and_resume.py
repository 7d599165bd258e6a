"""A candidate that ends half-way and goes on in new processes, and what is not restored then."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from bitproof.builtin_cases.layouts import resume
from bitproof.harness.case import Parallelism
from bitproof.harness.errors import CaseError
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import CaseResult, Verdict

WRONG = "tests.harness.execute.laid_out"
DEFECTS = {
    "generator_not_restored": ("loss", "loss"),
    "moments_of_the_wrong_shard": ("param", "blocks.0.up.weight"),
    "schedule_not_restored": ("param", "embedding.weight"),
    "generator_of_rank_0": ("loss", "loss"),
    "buffer_not_restored": ("buffer", "text@after_optimizer"),
    "moments_rounded": ("buffer", "embedding.weight.exp_avg@before_forward"),
    "moments_rounded_by_fewer": ("buffer", "embedding.weight.exp_avg@before_forward"),
}
UNREADABLE = {
    "cannot_save": "has no method save",
    "lacks_a_key": "schedule",
    "of_other_code": "output.weight",
    "killed_as_it_saves": "rank 1 of tests.harness.execute.laid_out:killed_as_it_saves was killed by signal 9",
    "half_written": "rank ",
    "saved_later": "metadata",
}
BASES = {"moments_rounded": resume.fsdp_then_tp, "moments_rounded_by_fewer": resume.fsdp_four_then_two} | dict.fromkeys(
    ("generator_of_rank_0", "buffer_not_restored", *UNREADABLE),
    replace(resume.resume_dropout, parallelism=Parallelism(world_size=2, ep=1)),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, CaseResult]:
    wrong = [
        replace(BASES.get(name, resume.resume_fsdp), name=name, candidate=f"{WRONG}:{name}")
        for name in (*DEFECTS, *UNREADABLE)
    ]
    others = resume.fsdp_then_tp, resume.fsdp_four_then_two, resume.fsdp_two_then_four
    cases = [resume.resume_fsdp, *others, *wrong]
    options = RunOptions(device="cpu", control="never", explain_timeout=1.0)  # the verdicts are what is asked for
    folder = tmp_path_factory.mktemp("run")
    return {result.case.name: result for result in run_cases(cases, options, folder)}


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_goes_on_in_new_processes_computes_every_bit_of_one_that_never_stopped(results):
    result = results["resume_fsdp"]
    assert (result.verdict, result.error) == (Verdict.EQUAL, None), result.error
    assert result.compared["param"] == 2 * 4 * 12


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_what_is_not_restored_shows_in_the_first_step_after(results, name):
    result = results[name]
    assert result.verdict == Verdict.DIFFERENT, result.error
    first = result.first_divergence
    assert (first.step, first.kind, first.name) == (2, *DEFECTS[name])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_checkpoint_that_cannot_be_read_or_is_none_is_an_error_that_says_what_it_lacks(results, name):
    assert results[name].verdict == Verdict.ERROR
    assert UNREADABLE[name] in results[name].error


@pytest.mark.ranks
@pytest.mark.slow
def test_what_another_layout_loads_must_be_what_was_saved_and_what_it_computes_is_close(results):
    result = results["fsdp_then_tp"]
    assert result.verdict == Verdict.CLOSE, result.error
    assert result.first_divergence.step == 2 and result.first_divergence.kind == "grad"
    assert (result.layouts.exact, result.layouts.regrouped, result.layouts.beyond) == (238, 166, 0)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp_four_then_two", "fsdp_two_then_four"])
def test_another_number_of_ranks_goes_on_from_what_was_saved_and_is_compared_from_there_on(results, name):
    result = results[name]
    assert (result.verdict, result.error) == (Verdict.CLOSE, None), result.error
    assert result.layouts.exact == 3 * 12, "parameters and both moments that the first step begins with"
    assert result.compared["param"] == result.world_size * 2 * 12 and len(result.losses["reference"]) == 2
    assert result.layouts.beyond == 0 and result.first_divergence.step == 2


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_have_what_four_under_torchrun_saved_before_they_were_killed(tmp_path):
    saved = tmp_path / "saved"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [*torchrun, "-m", "tests.harness.execute.killed_ranks", str(saved)], capture_output=True, text=True, check=False
    )
    assert ended.returncode and "SIGKILL" in ended.stderr and (saved / ".metadata").exists(), ended.stderr
    two, four = (Parallelism(world_size=ranks, ep=1) for ranks in (2, 4))
    right = replace(
        resume.fsdp_then_ddp,
        name="fewer",
        steps=2,
        resume_at=None,
        resumes_reference=False,
        reference=f"{WRONG}:loaded",
        candidate=f"{WRONG}:loaded",
        parallelism=two,
        reference_parallelism=four,
        options={"saved": str(saved)},
        expected="CLOSE",
    )
    cases = [right, replace(right, name="wrong", candidate=f"{WRONG}:loaded_wrong")]
    fewer, wrong = run_cases(cases, RunOptions(device="cpu"), tmp_path / "run")
    assert (fewer.verdict, fewer.error) == (Verdict.CLOSE, None)
    assert fewer.layouts.exact == 3 * 12, "parameters and both moments that the first step begins with"
    first = wrong.first_divergence
    assert (wrong.verdict, first.step, first.name) == (Verdict.DIFFERENT, 0, "blocks.0.up.weight@before_forward")


@pytest.mark.parametrize(
    "changes",
    [
        {"resumes_reference": True, "resume_at": None},
        {"resumes_reference": True, "expected": "CLOSE", "close_within": 0.1},
    ],
)
def test_what_the_reference_saved_is_loaded_half_way_and_without_a_bound(changes):
    with pytest.raises(CaseError, match="loads what the reference saved"):
        replace(resume.resume_fsdp, **changes)


@pytest.mark.parametrize("changes", [{"resume_at": 0}, {"resume_at": 4}, {"candidate": "eager"}])
def test_a_case_cannot_go_on_before_its_first_step_after_its_last_or_with_a_system_of_ours(changes):
    with pytest.raises(CaseError, match="end and go on"):
        replace(resume.resume_fsdp, **changes)


def test_steps_before_another_number_of_ranks_takes_part_are_not_compared():
    fewer, as_many = resume.fsdp_four_then_two, resume.fsdp_then_hsdp
    assert (fewer.compared_steps, as_many.compared_steps) == (range(2, 4), range(4))
    assert replace(fewer, resumes_reference=False).compared_steps == range(4), "it takes all steps on its own ranks"


def test_the_cases_of_the_family_go_on_half_way():
    for case in resume.CASES:
        assert case.resume_at == case.steps // 2 and case.parallelism != Parallelism()
