"""No schedule has ranks that wait for each other, under the strictest reading of how NCCL sends."""

from __future__ import annotations

import pytest

from bitproof.harness.case import Schedule, StageMap
from bitproof.harness.errors import PassError
from bitproof.harness.graph.staged import stage_messages as messages
from bitproof.harness.graph.staged.orders import actions_of
from bitproof.harness.graph.staged.stage_messages import refuse_waiting
from tests.harness.graph.staged.orders.test_loop import SCHEDULES


def check(ranks, schedule):
    actions = [actions_of(schedule, ranks, rank) for rank in range(ranks)]
    refuse_waiting(actions, schedule.stage_map(ranks))


@pytest.mark.parametrize(("ranks", "schedule"), [*SCHEDULES, (8, Schedule(micro_batches=32, stages_per_rank=3))])
def test_no_ranks_wait_in_a_circle_where_each_direction_and_half_has_a_group(ranks, schedule):
    check(ranks, schedule)


@pytest.mark.parametrize("several", [1, 2])
def test_in_one_group_neighbours_would_send_to_each_other_for_ever(monkeypatch, several):
    monkeypatch.setattr(messages, "group_of", lambda sender, stage_map: 0)
    with pytest.raises(PassError) as error:
        check(2, Schedule(micro_batches=4, stages_per_rank=several))
    what, expected, found, _fix = str(error.value).splitlines()
    assert what == "PassError: ranks of the pipeline could wait for each other forever"
    assert expected.startswith("  expected: actions whose messages, in each direction, are received in the order")
    assert found.startswith("  found: 2 of 2 ranks wait before ")


@pytest.mark.parametrize("order", ["zbv", "dual_pipe_v"])
def test_in_a_v_activations_and_gradients_of_a_neighbour_cannot_share_a_group(monkeypatch, order):
    in_two_groups = lambda sender, stage_map: int(  # noqa: E731
        stage_map.rank_of(sender.stage) < stage_map.rank_of(sender.receiver)
    )
    monkeypatch.setattr(messages, "group_of", in_two_groups)
    check(4, Schedule(micro_batches=8, stages_per_rank=2))
    with pytest.raises(PassError, match="4 of 4 ranks wait before "):
        check(4, Schedule(micro_batches=8, stages_per_rank=2, order=order))


def test_a_message_that_is_read_before_an_earlier_one_is_refused():
    first, second = (actions_of(Schedule(order="gpipe", micro_batches=2), 2, rank) for rank in range(2))
    exchanged = [second[1], second[0], *second[2:]]
    refuse_waiting([first, second], StageMap(2))
    with pytest.raises(PassError, match="2 of 2 ranks wait before backward of micro-batch 0 in stage 0, forward of"):
        refuse_waiting([first, exchanged], StageMap(2))
