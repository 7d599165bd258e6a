"""Whatever goes wrong on a rank, at whatever moment, is an error that names the rank, and the next case runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import CaseResult, Verdict
from tests.harness.deeds import DEEDS, HOST_DEEDS, MOMENTS
from tests.harness.execute.test_launch import nothing_left_behind

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

WORLD_SIZE = 3
MATRIX = [(deed, moment, rank) for deed in DEEDS for moment in MOMENTS for rank in (0, WORLD_SIZE - 1)]
HANGS = ("stopped", "hanging")
HANG_SECONDS = 12.0
STEADY = Case(
    name="steady",
    family="toy",
    reference="tests.harness.toy_systems:steady",
    candidate="tests.harness.toy_systems:steady",
    steps=3,
    parallelism=Parallelism(world_size=WORLD_SIZE, ep=1),
)


def wrong(deed: str, moment: str, rank: int) -> Case:
    return replace(
        STEADY, name=f"{deed}_{moment}_on_{rank}", candidate=f"tests.harness.deeds:{deed}_{moment}_on_{rank}"
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseResult]:
    """Every entry, each before a case in which nothing goes wrong: on one host, and those that hang on another."""
    found: dict[str, CaseResult] = {}
    with nothing_left_behind(tmp_path_factory.mktemp("temporary")):
        for hangs, timeout in ((False, 120.0), (True, HANG_SECONDS)):  # where nothing hangs, a busy machine has time
            entries = [wrong(*entry) for entry in MATRIX if (entry[0] in HANGS) == hangs]
            cases = [each for case in entries for each in (case, replace(STEADY, name=f"{case.name}_then"))]
            options = RunOptions(device="cpu", timeout=timeout, control="never")
            found |= {result.case.name: result for result in run_cases(cases, options, tmp_path_factory.mktemp("run"))}
    return found


@pytest.mark.parametrize(("deed", "moment", "rank"), MATRIX)
def test_it_is_an_error_that_names_the_rank_and_the_next_case_is_equal(
    results: dict[str, CaseResult], deed: str, moment: str, rank: int
) -> None:
    case = wrong(deed, moment, rank)
    result = results[case.name]
    assert (result.verdict, results[f"{case.name}_then"].verdict) == (Verdict.ERROR, Verdict.EQUAL), result.error
    assert result.error is not None
    if deed in HANGS:
        assert f"did not finish: the case ran longer than {HANG_SECONDS:g} s" in result.error
        assert f"rank {rank}, logs/" in result.error, "its stack, or its log's end, is shown"
    else:
        assert result.error.startswith(f"RankError: rank {rank} of {case.candidate} ")


@pytest.mark.parametrize("moment", MOMENTS[:2])
@pytest.mark.parametrize("deed", HOST_DEEDS)
def test_a_host_that_is_ended_is_an_error_and_leaves_nothing(
    deed: str, moment: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with nothing_left_behind(tmp_path_factory.mktemp("temporary")):
        options = RunOptions(device="cpu", timeout=12.0, control="never")
        [result] = run_cases([wrong(deed, moment, 0)], options, tmp_path_factory.mktemp("run"))
    assert result.verdict == Verdict.ERROR
    assert result.error is not None and result.error.startswith("RankError: the ")
