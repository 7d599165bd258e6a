"""Systems that chunk must have chunked the same modules equally often; others have nothing to agree on."""

from __future__ import annotations

from typing import Any

import pytest

from bitproof.harness.compare.chunked import agreed_by_ranks
from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Manifest, Verdict

BOTH = {"layers.0": 1, "layers.1": 1}
COLUMN = {"code_hash": "0", "passes": [{"name": "clean_up"}, {"name": "chunk"}]}


def chunked(recording: Any, chunked: Any, system: str = "eager_chunked", graph: Any = None) -> Any:
    reported = recording.manifest.to_dict() | {"system": system, "graph": graph, "chunked": chunked}
    recording.manifest = Manifest.of(reported)
    return recording


def test_systems_that_chunked_the_same_modules_equally_often_are_equal(case, record):
    sides = chunked(record(), BOTH), chunked(record(), dict(reversed(BOTH.items())), "graph", COLUMN)
    assert compare(*sides, case).verdict == Verdict.EQUAL


@pytest.mark.parametrize(
    ("other", "reported"),
    [
        ({"layers.0": 1}, "layers.1 1, the candidate layers.1 0"),
        ({"layers.0": 2, "layers.1": 1}, "layers.0 1, the candidate layers.0 2"),
        ({"layers.7": 1}, "layers.0 1, layers.1 1, layers.7 0, the candidate layers.0 0, layers.1 0, layers.7 1"),
    ],
)
def test_the_same_bits_of_systems_that_chunked_otherwise_are_unverified_and_the_modules_named(
    case, record, other, reported
):
    comparison = compare(chunked(record(), BOTH), chunked(record(), other, "graph", COLUMN), case)
    assert (comparison.verdict, comparison.reason) == (
        Verdict.UNVERIFIED,
        f"the recordings are not comparable\n  the reference ran in chunks, in calls a step, {reported}",
    )


@pytest.mark.parametrize("damaged", [None, {}, {"layers.0": 0}, {"layers.0": -1}])
@pytest.mark.parametrize(("system", "graph"), [("eager_chunked", None), ("graph", COLUMN)])
def test_a_recording_of_a_system_that_chunks_must_say_what_it_chunked(case, record, damaged, system, graph):
    comparison = compare(chunked(record(), BOTH), chunked(record(), damaged, system, graph), case)
    assert (comparison.verdict, comparison.reason) == (
        Verdict.UNVERIFIED,
        "the recordings are not comparable\n  the candidate does not say which modules ran in chunks: record it again",
    )


def test_a_recording_from_before_this_was_reported_is_unverified_and_no_crash(case, record):
    old = chunked(record(), None)
    assert compare(old, chunked(record(), BOTH), case).reason == (
        "the recordings are not comparable\n  the reference does not say which modules ran in chunks: record it again"
    )


@pytest.mark.parametrize(
    ("system", "graph"),
    [
        ("eager", None),
        ("user.module:factory", None),
        ("graph", {"code_hash": "0", "passes": [{"name": "clean_up"}]}),
        ("graph", {"code_hash": "0"}),
    ],
)
def test_a_system_that_does_not_chunk_or_says_nothing_of_it_has_nothing_to_agree_on(case, record, system, graph):
    for reported in (None, BOTH):
        other = chunked(record(), reported, "eager_chunked" if reported else "eager")
        assert compare(other, chunked(record(), None, system, graph), case).verdict == Verdict.EQUAL


def test_ranks_that_ran_the_same_modules_in_chunks_agree():
    assert agreed_by_ranks("graph", [BOTH, dict(BOTH)]) == BOTH
    assert agreed_by_ranks("eager", [None, None]) is None


@pytest.mark.parametrize(
    ("other", "expected", "found"),
    [
        ({"layers.0": 1, "layers.1": 2}, "layers.1 1", "layers.1 2"),
        (None, "layers.0 1, layers.1 1", "layers.0 0, layers.1 0"),
    ],
)
def test_a_rank_that_chunked_otherwise_is_named(other, expected, found):
    with pytest.raises(RecordingError) as error:
        agreed_by_ranks("eager_chunked", [BOTH, BOTH, other, BOTH])
    assert str(error.value) == (
        "RecordingError: rank 2 of eager_chunked ran other modules in chunks than rank 0\n"
        f"  expected: calls a step, as on rank 0: {expected}\n"
        f"  found: {found}"
    )
