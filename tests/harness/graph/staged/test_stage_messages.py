"""No schedule has ranks that wait for each other, under the strictest reading of how NCCL sends."""

from __future__ import annotations

import pytest

from bitproof.harness.case import Schedule
from bitproof.harness.errors import PassError
from bitproof.harness.graph.staged import stage_messages as messages
from bitproof.harness.graph.staged.actions import actions_of
from bitproof.harness.graph.staged.stage_messages import refuse_waiting
from tests.harness.graph.staged.test_actions import SCHEDULES


def check(ranks, schedule):
    actions = [actions_of(schedule, ranks, rank) for rank in range(ranks)]
    refuse_waiting(actions, ranks * schedule.stages_per_rank)


@pytest.mark.parametrize(("ranks", "schedule"), [*SCHEDULES, (8, Schedule(micro_batches=32, stages_per_rank=3))])
def test_no_ranks_wait_in_a_circle_where_each_direction_has_a_group(ranks, schedule):
    check(ranks, schedule)


@pytest.mark.parametrize("several", [1, 2])
def test_in_one_group_neighbours_would_send_to_each_other_for_ever(monkeypatch, several):
    monkeypatch.setattr(messages, "goes_up", lambda sender, receiver: True)
    with pytest.raises(PassError) as error:
        check(2, Schedule(micro_batches=4, stages_per_rank=several))
    what, expected, found, _fix = str(error.value).splitlines()
    assert what == "PassError: ranks of the pipeline could wait for each other forever"
    assert expected.startswith("  expected: actions whose messages, in each direction, are received in the order")
    assert found.startswith("  found: 2 of 2 ranks wait before ")


def test_a_message_that_is_read_before_an_earlier_one_is_refused():
    first, second = (actions_of(Schedule(order="gpipe", micro_batches=2), 2, rank) for rank in range(2))
    exchanged = [second[1], second[0], *second[2:]]
    refuse_waiting([first, second], 2)
    with pytest.raises(PassError, match="2 of 2 ranks wait before backward of micro-batch 0 in stage 0, forward of"):
        refuse_waiting([first, exchanged], 2)
