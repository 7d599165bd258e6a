"""Broadcasts that change no rank's memory, in logs written by hand. A value that the reference lacks is a capital."""

from __future__ import annotations

from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.idle_broadcasts import without_idle_broadcasts
from tests.harness.localize.test_blame import call

MODEL, POSITIONS = CallSite(None, "forward"), CallSite("pos", "forward")


def sent(text: str, by: int | None = None) -> Call:
    """A collective that writes what it reads, given by a call."""
    return call(text, MODEL, collective=True)._replace(producers=(by,), peers=(0, 1))


def looked_up(first: str, second: str, *, begins: int) -> list[Call]:
    """`pos(positions[:n])`, where call `begins - 1` left the positions."""
    shown = call(f"slice {first} -> {second}", MODEL)._replace(view=True, producers=(begins - 1 if begins else None,))
    return [shown, call(f"embedding w {second} -> E", POSITIONS)._replace(producers=(None, begins))]


REFERENCE = [call("arange -> p", MODEL), call("embedding w p -> e", POSITIONS)._replace(producers=(None, 0))]


def blamed(candidate: list[Call], reference: list[Call] = REFERENCE) -> tuple[str, str]:
    culprit = find_culprit([reference, reference], [candidate, candidate], {0: [("e", "E")], 1: [("e", "E")]})
    assert culprit is not None
    return culprit.how, culprit.call.operator


def test_the_reader_of_a_new_buffer_is_blamed_and_not_the_broadcast_that_left_it_as_it_was():
    assert blamed([sent("broadcast_ P -> P"), *looked_up("P", "Q", begins=1)]) == ("inherits", "embedding")


def test_the_same_without_a_broadcast():
    assert blamed(looked_up("P", "Q", begins=0)) == ("inherits", "embedding")


def test_several_buffers_that_are_joined_sent_and_copied_back_are_as_they_were_before():
    parts = [
        call("cat C P -> F", MODEL)._replace(producers=(None, None)),
        sent("broadcast_ F -> F", 0),
        call("narrow F -> P", MODEL)._replace(view=True, producers=(1,)),
        call("copy_ P P -> P", MODEL)._replace(producers=(None, 2)),
        *looked_up("P", "Q", begins=4),
    ]
    assert blamed(parts) == ("inherits", "embedding")


def test_a_broadcast_that_changes_another_rank_s_memory_stays():
    first, second = sent("broadcast_ P -> P"), sent("broadcast_ R -> P")
    logs = [[first, *looked_up("P", "Q", begins=1)], [second, *looked_up("P", "Q", begins=1)]]
    assert without_idle_broadcasts(logs) == logs
    culprit = find_culprit([REFERENCE] * 2, logs, {0: [("e", "E")], 1: [("e", "E")]})
    assert culprit is not None and culprit.call.operator == "broadcast_"


def test_a_sum_that_gives_what_it_reads_and_a_copy_of_what_was_computed_stay():
    calls = [
        sent("allreduce_ Z -> Z"),
        sent("broadcast_ P -> P"),
        call("mul P -> P", MODEL)._replace(producers=(1,)),
        call("copy_ P P -> P", MODEL)._replace(producers=(None, 2)),
    ]
    kept = [log[:1] + log[2:] for log in without_idle_broadcasts([calls, calls])]
    expected = [calls[0], calls[2]._replace(producers=(None,)), calls[3]]
    assert kept == [expected, expected]


def test_a_reader_that_the_reference_has_too_with_the_same_view_leaves_blame_with_the_view():
    """The parent shows another part of the buffer: that is wrong, and the lookup is not."""
    shown = [call("slice b -> p", MODEL)._replace(view=True, producers=(None,)), REFERENCE[1]]
    other = [shown[0]._replace(outputs=("Q",)), call("embedding w Q -> E", POSITIONS)._replace(producers=(None, 0))]
    assert blamed(other, shown)[1] == "slice"
