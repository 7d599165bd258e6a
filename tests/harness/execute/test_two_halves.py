"""A candidate that ends half-way and goes on in new processes, and what is not restored then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.builtin_cases import resume
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
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, CaseResult]:
    wrong = [replace(resume.resume_fsdp, name=name, candidate=f"{WRONG}:{name}") for name in DEFECTS]
    cannot = replace(resume.resume_fsdp, name="cannot", candidate=f"{WRONG}:cannot_save")
    cases = [resume.resume_fsdp, *wrong, cannot]
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
def test_a_candidate_that_cannot_save_is_an_error_that_says_what_it_lacks(results):
    assert results["cannot"].verdict == Verdict.ERROR
    assert "has no method save" in results["cannot"].error


@pytest.mark.parametrize("changes", [{"resume_at": 0}, {"resume_at": 4}, {"candidate": "eager"}])
def test_a_case_cannot_go_on_before_its_first_step_after_its_last_or_with_a_system_of_ours(changes):
    with pytest.raises(CaseError, match="end and go on"):
        replace(resume.resume_fsdp, **changes)


def test_the_cases_of_the_family_go_on_half_way():
    for case in resume.CASES:
        assert case.resume_at == case.steps // 2 and case.parallelism != Parallelism()
