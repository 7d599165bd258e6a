"""The orders of stages in a V: every action once, in micro-batches' order, without deadlock, in the memory and the time
that the orders' authors state.

`timed` runs an order on a clock: each action takes 1, and results are with their readers at once.
"""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules

from bitproof.harness.case import Schedule, StageMap
from bitproof.harness.graph.staged.actions import Action
from bitproof.harness.graph.staged.orders import actions_of
from bitproof.harness.graph.staged.stage_messages import refuse_waiting

SHAPES = [(2, 4), (2, 5), (3, 9), (5, 31), (8, 16)]
"""Ranks and micro-batches: the fewest there may be, one more, and many; ranks even and odd."""

V_ORDERS = ("zbv", "dual_pipe_v")
each_order = pytest.mark.parametrize("order", V_ORDERS)
each_shape = pytest.mark.parametrize(("ranks", "count"), SHAPES)


def schedule_of(order, count):
    return Schedule(order=order, micro_batches=count, stages_per_rank=2)


def timed(order, ranks, count):
    """Return for each rank the times at which its actions begin, in order."""
    schedule = schedule_of(order, count)
    waiting = [actions_of(schedule, ranks, rank) for rank in range(ranks)]
    begins, ends = [[] for _ in waiting], {}
    while any(waiting):
        for rank, own in enumerate(waiting):
            while own and needed(own[0], 2 * ranks - 1) <= ends.keys():
                free = begins[rank][-1] + 1 if begins[rank] else 0
                begins[rank].append(max([free, *(ends[x] for x in needed(own[0], 2 * ranks - 1))]))
                ends[own.pop(0)] = begins[rank][-1] + 1
    return begins


def needed(action, last):
    half, stage, micro_batch, part = action
    if half == "forward":
        return {action._replace(stage=stage - 1)} if stage else set()
    if part == "weights":
        return {action._replace(part="input")}
    return {Action("forward", stage, micro_batch)} | ({action._replace(stage=stage + 1)} if stage < last else set())


def most_in_flight(actions):
    """Return the largest number of forwards whose values wait for a part of their backward."""
    now = most = 0
    for action in actions:
        now += (action.half == "forward") - (action.part == "weights")
        most = max(most, now)
    return most


@each_order
@each_shape
def test_every_rank_takes_each_micro_batch_in_order_through_its_two_stages(order, ranks, count):
    schedule = schedule_of(order, count)
    for rank in range(ranks):
        own = actions_of(schedule, ranks, rank)
        assert {action.stage for action in own} == {rank, 2 * ranks - 1 - rank}
        for stage in (rank, 2 * ranks - 1 - rank):
            for half, part in (("forward", "whole"), ("backward", "input"), ("backward", "weights")):
                turns = [x.micro_batch for x in own if (x.half, x.stage, x.part) == (half, stage, part)]
                assert turns == list(range(count)), "gradients are added in this order"
        assert len(own) == 6 * count


@each_order
@each_shape
def test_no_rank_waits_for_ever_although_a_neighbour_sends_activations_and_gradients(order, ranks, count):
    schedule = schedule_of(order, count)
    refuse_waiting([actions_of(schedule, ranks, rank) for rank in range(ranks)], schedule.stage_map(ranks))


@each_shape
def test_zbv_leaves_no_rank_idle_between_its_first_and_its_last_action(ranks, count):
    for rank, begins in enumerate(timed("zbv", ranks, count)):
        assert begins == list(range(rank, rank + 6 * count))


@each_shape
def test_dual_pipe_v_leaves_each_rank_idle_for_as_many_actions_as_there_are_other_ranks(ranks, count):
    # https://github.com/deepseek-ai/DualPipe states (PP/2 - 1)(F&B + B - 3W) with PP = 2 * ranks: this many actions if
    # a forward F and the weights W take 1, a backward B 2, and an overlapped pair F&B as long as its backward.
    pair, backward, weights = 2, 2, 1
    bubble = (ranks - 1) * (pair + backward - 3 * weights)
    assert {begins[-1] + 1 - 6 * count for begins in timed("dual_pipe_v", ranks, count)} == {bubble}


@pytest.mark.parametrize(("order", "more"), [("zbv", 0), ("dual_pipe_v", 1)])
@each_shape
def test_a_rank_keeps_the_values_of_as_many_forwards_as_there_are_stages(order, more, ranks, count):
    for rank in range(ranks):
        assert most_in_flight(actions_of(schedule_of(order, count), ranks, rank)) == 2 * ranks + more


LETTERS = {"whole": "F", "input": "I", "weights": "W"}


def test_the_last_of_two_ranks_takes_four_micro_batches_as_the_docstrings_say():
    own = StageMap(2, 2, is_v=True).stages_of(1)
    found = [
        " ".join(f"{LETTERS[x.part]}{own.index(x.stage)}" for x in actions_of(schedule_of(order, 4), 2, 1))
        for order in V_ORDERS
    ]
    assert found == [
        "F0 F1 F0 F1 I1 W1 F0 I0 W0 F1 I1 W1 F0 I0 W0 F1 I1 W1 I0 I1 I0 W0 W1 W0",
        "F0 F1 F0 F1 F0 I1 W1 F1 I0 W0 F0 I1 W1 F1 I0 W0 I1 W1 I0 W0 I1 I0 W1 W0",
    ]


@each_order
@each_shape
def test_torch_has_the_same_order(order, ranks, count):
    kind = {"zbv": schedules.ScheduleZBVZeroBubble, "dual_pipe_v": schedules.ScheduleDualPipeV}[order]
    # torch keeps a backward whole where its two parts follow each other.
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "IW"}
    for rank in range(ranks):
        theirs = kind.__new__(kind)
        theirs.pp_group_size, theirs.num_stages, theirs._n_microbatches = ranks, 2 * ranks, count
        listed = [x for x in theirs._calculate_single_rank_operations(rank) if x is not None]
        found = [
            (letter, x.stage_index, x.microbatch_index)
            for pair in listed
            for x in (pair.sub_actions or [pair])
            for letter in letters[x.computation_type.name]
        ]
        own = actions_of(schedule_of(order, count), ranks, rank)
        assert [(LETTERS[x.part], x.stage, x.micro_batch) for x in own] == found
