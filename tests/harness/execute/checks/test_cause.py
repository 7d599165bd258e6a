"""Which search a verdict asks for, what its answer or its failure makes of the judgement, and what it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitproof.harness.case import Case
from bitproof.harness.compare.verdict import Comparison, Judgement, Repeat
from bitproof.harness.errors import RankError
from bitproof.harness.execute.checks.case_checks import DECIDING, applied
from bitproof.harness.localize.search import UnrepeatableError
from bitproof.harness.options import RunOptions
from bitproof.harness.records import NO_CALL, BlamedCall, CaseSeconds, Divergence, Key, Verdict

CASE = Case(name="toy", family="toy", reference="mine:eager", candidate="mine:graph", steps=3)
FIRST = Divergence(step=1, kind="grad", name="weight", rank=0)
BLAMED = replace(FIRST, call=BlamedCall(operator="add.Tensor"))
EQUAL = Judgement(
    verdict=Verdict.EQUAL,
    compared={},
    mismatched={},
    differing_kinds=(),
    first_divergence=None,
    control={"reference": None, "candidate": None},
    error=None,
)
DIFFERENT = replace(EQUAL, verdict=Verdict.DIFFERENT, first_divergence=FIRST)
PLAIN, STRESSED = (Repeat("candidate", stressed, Comparison(verdict=Verdict.DIFFERENT)) for stressed in (False, True))


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Explain a judgement where searches find, or raise, what is given: the judgement, the run, the searches."""

    def searched(
        judgement: Judgement,
        *,
        cause: Any = BLAMED,
        noise: Any = (BLAMED, None),
        repeats: Any = (PLAIN, STRESSED),
        has_partners: bool = True,
        **options: Any,
    ) -> Any:
        archives, log = tmp_path / "archives", []
        archives.mkdir(exist_ok=True)

        def described(found: Any) -> Any:
            if isinstance(found, Exception):
                raise found
            return found

        class Search:
            def __init__(self, recordings: Any, *_: Any, **__: Any) -> None:
                self.remarks: list[str] = []

            def explain(self, first: Divergence) -> Any:
                log.append(("cause", first))
                return described(cause)

        class NoiseSearch:
            def __init__(self, *_: Any, role: str, stressed: bool) -> None:
                self.remarks: list[str] = []
                self.of = f"{role}{' under stress' if stressed else ''}"

            def explain_noise(self, first: Divergence) -> Any:
                log.append(("noise", self.of))
                return described(noise)

        class EveryCall:
            def __init__(self, *_: Any) -> None:
                pass

            def judge(self, judgement: Judgement) -> Judgement:
                log.append(("every call", judgement.verdict))
                return replace(judgement, verdict=Verdict.DIFFERENT)

        stand_ins = {"noise": NoiseSearch, "every_call": EveryCall, "search": Search}  # the last is what others extend
        for module, stand_in in stand_ins.items():
            monkeypatch.setattr(f"bitproof.harness.localize.{module}.{stand_in.__name__}", stand_in)
        run: Any = SimpleNamespace(
            case=CASE,
            options=RunOptions(**options),
            firsts={},
            archives=archives,
            repeats=repeats,
            watches={},
            across=None,
            has_partners=has_partners,
            shows_bits=True,
            seconds=CaseSeconds(),
            remarks=[],
            every_call=None,
            begin_explaining=lambda: None,
            replay=None,
            compare_bits=None,
        )
        found = applied({name: DECIDING[name] for name in ("cause", "every_call")}, judgement, run)
        assert archives.exists() == (run.seconds.replay is None), "what replays left is gone, and nothing else"
        return found, run, log

    return searched


@pytest.mark.parametrize(
    "judgement",
    [EQUAL, replace(EQUAL, verdict=Verdict.UNVERIFIED), replace(EQUAL, verdict=Verdict.DIFFERENT)],
    ids=["equal", "unverified", "different in nothing that has a place"],
)
def test_a_judgement_that_leaves_nothing_to_explain_comes_back_and_nothing_is_replayed(
    searched: Any, judgement: Judgement
) -> None:
    found, run, log = searched(judgement)
    assert (found, log, run.remarks, run.every_call) == (judgement, [], [], None)


def test_a_difference_is_led_to_its_call_and_where_there_is_none_a_remark_says_so(
    searched: Any, tmp_path: Path
) -> None:
    found, run, log = searched(DIFFERENT)
    assert (found, log) == (replace(DIFFERENT, first_divergence=BLAMED), [("cause", FIRST)])
    assert run.remarks == [] and run.seconds.replay >= 0
    found, run, _ = searched(DIFFERENT, cause=FIRST)
    assert (found, run.remarks) == (DIFFERENT, [NO_CALL])


def test_a_difference_beside_which_records_are_missing_is_led_to_its_call_unless_a_system_differs_from_itself(
    searched: Any,
) -> None:
    """As where a parameter that an update leaves out has no state: that is not compared, and its value is."""
    gaps = replace(DIFFERENT, verdict=Verdict.UNVERIFIED, error="the evidence is incomplete")
    found, _, log = searched(gaps, repeats=[])
    assert (found, log) == (replace(gaps, first_divergence=BLAMED), [("cause", FIRST)])
    found, _, log = searched(gaps, repeats=[STRESSED])
    assert (found, log) == (gaps, [])
    found, _, log = searched(gaps, repeats=[], cause=UnrepeatableError("reference", Key(1, "grad", "weight", 0)))
    assert found.verdict == Verdict.UNVERIFIED and log == [("cause", FIRST)]
    assert found.error.endswith("a replay of the reference did not reproduce its recording")


def test_a_search_that_fails_leaves_the_verdict_and_is_reported(searched: Any) -> None:
    found, _, _ = searched(DIFFERENT, cause=RankError("rank 1 died"))
    text = "a replay that looks for the cause failed; the verdict stands:\nRankError: rank 1 died"
    assert found == replace(DIFFERENT, error=text)


def test_noise_is_looked_for_in_the_run_that_the_divergence_is_of(searched: Any) -> None:
    noisy = replace(DIFFERENT, verdict=Verdict.NONDETERMINISTIC, error="control of candidate: apart")
    for repeat, of in ((PLAIN, "candidate"), (STRESSED, "candidate under stress")):
        judgement = replace(noisy, first_divergence=replace(FIRST, between=repeat.between))
        found, _, log = searched(judgement, noise=(BLAMED, "it is new at each run"))
        assert log == [("noise", of)]
        assert found.first_divergence == BLAMED
        assert found.error == "control of candidate: apart\nit is new at each run"


def test_a_replay_that_is_not_its_recording_makes_noise_of_a_difference(searched: Any) -> None:
    unlike = UnrepeatableError("reference", Key(1, "grad", "weight", 0))
    found, _, log = searched(DIFFERENT, cause=unlike)
    assert log == [("cause", FIRST), ("noise", "reference")]
    assert (found.verdict, found.control) == (
        Verdict.NONDETERMINISTIC,
        {"reference": "NONDETERMINISTIC", "candidate": None},
    )
    assert found.error == (
        "a replay of reference mine:eager did not reproduce step 1, rank 0, grad weight: "
        "its bits differ from the recorded ones"
    )
    failed, _, _ = searched(DIFFERENT, cause=unlike, noise=RankError("rank 1 died"))
    assert failed.verdict == Verdict.NONDETERMINISTIC and failed.error.endswith("stands:\nRankError: rank 1 died")
    assert failed.first_divergence == replace(FIRST, between="reference against itself")


def test_an_equal_case_is_looked_at_as_it_is_asked_for(searched: Any) -> None:
    found, run, log = searched(EQUAL, every_call=True)
    assert (found.verdict, log) == (Verdict.DIFFERENT, [("every call", Verdict.EQUAL)])
    assert run.every_call is not None


def test_calls_of_two_layouts_are_not_searched_and_every_call_cannot_be_compared(searched: Any) -> None:
    found, _, log = searched(DIFFERENT, has_partners=False)
    assert (found, log) == (DIFFERENT, [])
    found, _, log = searched(EQUAL, has_partners=False, every_call=True)
    assert (found.verdict, log) == (Verdict.UNVERIFIED, [])
    assert found.error == "--every-call: calls of two layouts have no partners in the reference"
