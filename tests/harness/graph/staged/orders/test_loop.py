from __future__ import annotations

import pytest

from bitproof.harness.case import Schedule
from bitproof.harness.graph.staged.actions import Action
from bitproof.harness.graph.staged.orders import actions_of

SCHEDULES = [
    (ranks, Schedule(order=order, micro_batches=count, stages_per_rank=several))
    for ranks in (1, 2, 3, 4)
    for several in (1, 2, 3)
    for count in (ranks, 2 * ranks, 12)
    for order in ("gpipe", "1f1b")
    if several == 1 or (ranks > 1 and order == "1f1b")
]


def finished(schedule, ranks):
    """The actions in an order in which they can run, each after what it reads; fewer where ranks wait in a circle."""
    last = ranks * schedule.stages_per_rank - 1
    waiting = {rank: actions_of(schedule, ranks, rank) for rank in range(ranks)}
    done: list[Action] = []
    progress = True
    while progress:
        progress = False
        for actions in waiting.values():
            while actions and needed(actions[0], last) <= set(done):
                done.append(actions.pop(0))
                progress = True
    return done


def needed(action, last):
    half, stage, micro_batch, _ = action
    if half == "forward":
        return {Action("forward", stage - 1, micro_batch)} if stage else set()
    return {Action("forward", stage, micro_batch)} | (
        {Action("backward", stage + 1, micro_batch)} if stage < last else set()
    )


@pytest.mark.parametrize(("ranks", "schedule"), SCHEDULES)
def test_every_rank_takes_each_micro_batch_through_its_stages_once_and_nobody_waits_in_a_circle(ranks, schedule):
    done = finished(schedule, ranks)
    stages = range(ranks * schedule.stages_per_rank)
    expected = {
        Action(half, stage, index)
        for half in ("forward", "backward")
        for stage in stages
        for index in range(schedule.micro_batches)
    }
    assert len(done) == len(expected)
    assert set(done) == expected
    for rank in range(ranks):
        own = actions_of(schedule, ranks, rank)
        assert {action.stage % ranks for action in own} == {rank}
        for half in ("forward", "backward"):
            for stage in stages[rank::ranks]:
                turns = [action.micro_batch for action in own if action[:2] == (half, stage)]
                assert turns == list(range(schedule.micro_batches)), "gradients are added in this order"


def test_gpipe_takes_all_forwards_first_and_1f1b_keeps_no_more_micro_batches_than_stages_follow():
    halves = [action.half for action in actions_of(Schedule(order="gpipe", micro_batches=4), 2, 0)]
    assert halves == ["forward"] * 4 + ["backward"] * 4
    for rank in range(4):
        held, most = 0, 0
        for action in actions_of(Schedule(micro_batches=16), 4, rank):
            held += 1 if action.half == "forward" else -1
            most = max(most, held)
        assert most == 4 - rank


def test_an_action_says_what_it_does():
    action = actions_of(Schedule(micro_batches=2), 2, 1)[0]
    assert str(action) == "forward of micro-batch 0 in stage 1"
