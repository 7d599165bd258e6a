from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.harness.compare.outcome import MAX_ERROR, complete, result_of, result_of_error
from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import ChunkError, MachineError, PassError, RankError, RecordingError, TraceError
from bitproof.harness.records import CaseSeconds, Verdict
from tests.harness.judged import judge

SIDES = ("reference", "candidate")


@pytest.fixture
def case(case):
    """Of systems of a user's: those of ours record a gradient for every parameter, which these records lack."""
    return replace(case, reference="trainer:plain", candidate="trainer:overlapped")


def test_a_judged_case_becomes_a_result_with_its_facts(case, record, flip):
    candidate = record()
    flip(candidate, 0, "grad", "layers.0.b", 1)
    judgement = judge(case, compare(record(), candidate, case))
    losses = {"reference": record().losses(), "candidate": candidate.losses()}
    result = result_of(case, judgement, device="cpu", backend="gloo", losses=losses, seconds=CaseSeconds(trace=1.0))
    assert (result.verdict, result.steps, result.world_size) == (Verdict.DIFFERENT, 2, 2)
    assert result.first_divergence.name == "layers.0.b"
    assert result.seconds == CaseSeconds(trace=1.0)
    assert not result.as_expected


@pytest.mark.parametrize("error", [ChunkError("x"), TraceError("x"), PassError("x"), RankError("x"), ValueError("x")])
def test_a_failure_is_an_error_with_its_text(case, error):
    result = result_of_error(case, error, device="cpu", backend="gloo")
    assert result.verdict == Verdict.ERROR
    assert result.error == f"{type(error).__name__}: x"


def test_a_machine_that_lacks_something_leaves_a_case_unverified(case):
    result = result_of_error(case, MachineError("no compiler", fix="install one"), device="cpu", backend="gloo")
    assert (result.verdict, result.error) == (
        Verdict.UNVERIFIED,
        "MachineError: no compiler\n  fix: install one",
    )


def test_a_dead_rank_brings_its_traceback(case):
    error = RankError("rank 3 raised", rank=3, traceback="Traceback ...\nValueError: no")
    result = result_of_error(case, error, device="cpu", backend="gloo")
    assert result.error == "RankError: rank 3 raised\n\nTraceback ...\nValueError: no"


def test_a_damaged_recording_leaves_a_case_unverified(case):
    result = result_of_error(case, RecordingError("truncated"), device="cpu", backend="gloo")
    assert result.verdict == Verdict.UNVERIFIED


def test_a_verdict_that_its_own_numbers_contradict_is_withdrawn(case, record):
    judgement = judge(case, compare(record(), record(), case))
    losses = {"reference": ["0x1p+0", "0x1p+0"], "candidate": ["0x1p+0", "0x1p+1"]}
    result = result_of(case, judgement, device="cpu", backend="gloo", losses=losses)
    assert (result.verdict, result.error) == (
        Verdict.UNVERIFIED,
        "the verdict EQUAL is withdrawn, as verdict is EQUAL, expected no EQUAL, as losses differ",
    )


def test_a_case_without_a_result_is_unverified_and_keeps_its_place(case, record):
    judgement = judge(case, compare(record(), record(), case))
    found = result_of(case, judgement, device="cpu", backend="gloo", losses=dict.fromkeys(SIDES, record().losses()))
    before, after = replace(case, name="before"), replace(case, name="after")
    results = complete([before, case, after], [found], "interrupted")
    assert [(result.case.name, result.verdict) for result in results] == [
        ("before", Verdict.UNVERIFIED),
        ("tiny", Verdict.EQUAL),
        ("after", Verdict.UNVERIFIED),
    ]
    assert results[0].error == "interrupted"


def test_whatever_somebody_elses_exception_holds_a_results_error_is_bounded(case):
    long = "x" * 10_000_000
    for error in (ValueError(long), RankError(long, found=long, traceback=long)):
        reported = result_of_error(case, error, device="cpu", backend="gloo").error
        assert len(reported) < MAX_ERROR + 100 and "characters left out" in reported
    [result] = complete([case], [], long)
    assert len(result.error) < MAX_ERROR + 100
