"""Which runs of a case go at once, and that its verdict, logs and recordings are those of runs that take turns."""

import threading
from dataclasses import replace

import pytest

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.case import Batch, Model, Parallelism
from bitproof.harness.execute import concurrency
from bitproof.harness.execute.concurrency import begun, groups_of
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Verdict
from tests.harness.execute.test_launch import nothing_left_behind, toy

SMALL = replace(
    transformer_batch,
    steps=1,
    parallelism=Parallelism(world_size=1, ep=1),
    batch=Batch(sequences=2, seq_len=2),
    model=Model(layers=1, dense_layers=1, dim=8, heads=1),
)
EAGER = replace(SMALL, candidate="eager_chunked", reference="eager_chunked")
REFERENCE, CANDIDATE = ([(role, arm) for arm in ("first", "control")] for role in ("reference", "candidate"))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [[REFERENCE[0], CANDIDATE[0], REFERENCE[1], CANDIDATE[1]]]),
        (2, [REFERENCE, CANDIDATE]),
        (3, [REFERENCE[:1], CANDIDATE, REFERENCE[1:]]),
        (8, [REFERENCE[:1], CANDIDATE, REFERENCE[1:]]),
    ],
)
def test_both_sides_go_at_once_and_then_second_runs_but_those_of_a_graph_which_is_traced_once(most, expected):
    assert groups_of(SMALL, RunOptions(), most) == expected


def test_four_runs_go_at_once_where_no_side_is_a_graph():
    assert [len(group) for group in groups_of(EAGER, RunOptions(), 4)] == [1, 1, 1, 1]


def test_a_second_run_that_may_not_be_needed_is_not_begun():
    for control in ("when_different", "up_to_difference", "logged", "never"):
        assert groups_of(SMALL, RunOptions(control=control), 4) == [REFERENCE[:1], CANDIDATE[:1]]


def test_runs_take_turns_where_somebody_elses_code_takes_part():
    assert len(groups_of(toy(), RunOptions(), 4)) == 1
    passes = RunOptions(extra_passes=("mine.py:mend",))
    assert len(groups_of(SMALL, passes, 4)) == 1


class Place:
    """A session that may be left."""

    def __init__(self):
        self.is_left, self.log = threading.Event(), []

    def abandon(self):
        self.log.append("abandon")
        self.is_left.set()

    def resume(self):
        self.log.append("resume")


def test_runs_of_a_group_take_turns_and_none_follows_one_that_failed():
    asked, places = [], [Place(), Place()]

    def ask(place, arm):
        asked.append(arm)
        if arm == REFERENCE[0]:
            raise ValueError("broken")
        return arm[1]

    with begun([REFERENCE, CANDIDATE], places, ask) as runs:
        assert [runs.answer(arm) for arm in CANDIDATE] == ["first", "control"]
        for arm in REFERENCE:
            with pytest.raises(ValueError, match="broken"):
                runs.answer(arm)
    assert REFERENCE[1] not in asked
    assert not any("abandon" in place.log for place in places)


def test_what_is_still_under_way_when_a_case_is_judged_is_ended():
    places = [Place(), Place()]

    is_under_way = threading.Event()

    def ask(place, arm):
        if arm[0] == "candidate":
            is_under_way.set()
            assert place.is_left.wait(20)
        return arm

    with begun([REFERENCE[:1], CANDIDATE[:1]], places, ask) as runs:
        runs.answer(REFERENCE[0])
        assert is_under_way.wait(20)
    assert sorted(place.log for place in places) == [[], ["abandon", "resume"]]


def judged(folder, temporary, cores, monkeypatch, case):
    monkeypatch.setattr(concurrency, "cores_for_runs", lambda: cores)
    events = []
    with nothing_left_behind(temporary):
        [result] = run_cases([case], RunOptions(device="cpu", timeout=60.0), folder, events.append)
    return result, events


def recorded(folder):
    """Every recording's digests, as their file's bytes, and every log's name."""
    files = sorted(folder.rglob("digests.parquet"))
    logs = sorted(str(path.relative_to(folder)) for path in (folder / "logs").rglob("rank*.log"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}, logs


@pytest.mark.slow
@pytest.mark.ranks
def test_a_case_comes_to_the_same_side_by_side_and_in_turns(tmp_path, monkeypatch):
    found = {}
    for cores in (1, 2):
        folder, temporary = tmp_path / f"run{cores}", tmp_path / f"temporary{cores}"
        temporary.mkdir()
        found[cores] = (*judged(folder, temporary, cores, monkeypatch, EAGER), recorded(folder))
    (alone, alone_events, alone_files), (beside, beside_events, beside_files) = found.values()
    assert alone.verdict == beside.verdict == Verdict.EQUAL and not alone.error and not beside.error
    assert (alone.compared, alone.control, alone.losses) == (beside.compared, beside.control, beside.losses)
    assert alone.logs == beside.logs and alone_files == beside_files and len(alone_files[0]) == 4
    starts = [[(event.event, event.arm) for event in told] for told in (alone_events, beside_events)]
    assert sorted(starts[0]) == sorted(starts[1])
    assert len(list((tmp_path / "run2" / "logs").glob("host*.log"))) == 2
    assert len(list((tmp_path / "run1" / "logs").glob("host*.log"))) == 1
