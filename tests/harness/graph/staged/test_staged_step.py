"""A step in stages: all ranks in one process, with a box for the messages."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.case import Schedule
from bitproof.harness.graph.staged.actions import Action
from bitproof.harness.graph.staged.orders import actions_of
from bitproof.harness.graph.staged.placed_calls import Once
from bitproof.harness.graph.staged.staged_step import tag_of
from tests.harness.graph.graphs import Layers, batch
from tests.harness.graph.staged.stages import InOneProcess, all_actions, bits, layer, parts_of, run


def run_whole(joint, model, count):
    """The whole graph, once a micro-batch; gradients added in their order."""
    state = {name: x.detach().clone() for name, x in model.state_dict(keep_vars=True).items()}
    losses, totals = [], None
    for index in range(count):
        with torch.no_grad():
            loss, *gradients = joint.module(
                *(state[name] for name in [*joint.parameter_names, *joint.buffer_names]), batch(seed=index)
            )
        losses.append(loss)
        totals = gradients if totals is None else [a + b for a, b in zip(totals, gradients, strict=True)]
    return losses, totals, [state[name] for name in joint.buffer_names]


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [
        (1, Schedule(micro_batches=3)),
        (2, Schedule(micro_batches=4)),
        (2, Schedule(micro_batches=2, order="gpipe")),
        (2, Schedule(micro_batches=4, stages_per_rank=2)),
        (4, Schedule(micro_batches=4)),
    ],
)
def test_micro_batches_through_stages_give_the_bits_of_the_whole_graph(ranks, schedule):
    model = Layers(*(layer() for _ in range(4)))
    joint, parts = parts_of(model, ranks * schedule.stages_per_rank)
    found = run(joint, parts, model, schedule, ranks)
    assert bits(found) == bits(run_whole(joint, model, schedule.micro_batches))


def test_the_step_says_which_action_runs_and_parts_may_be_run_by_another():
    model = Layers(layer(), layer())
    joint, parts = parts_of(model, 2)
    step = InOneProcess(parts, all_actions(Schedule(micro_batches=2), 2))
    state = {name: x.detach().clone() for name, x in model.state_dict(keep_vars=True).items()}
    names = [*joint.parameter_names, *joint.buffer_names]
    seen = []

    def runner(module):
        seen.append((step.running, module))
        return module

    *kept, read = parts.placeholders
    with torch.no_grad(), step.run_by(runner):
        step({place: state[name] for place, name in zip(kept, names, strict=True)}, [{read: batch()}] * 2)
    assert [action for action, _ in seen] == list(step.actions)
    assert all(parts.by_place[action.stage, action.half].module is module for action, module in seen)
    assert step.running is None


def test_at_the_turn_of_a_v_values_stay_on_the_rank_and_nothing_of_them_is_left():
    schedule = Schedule(micro_batches=4, order="zbv", stages_per_rank=2)
    model = Layers(*(layer() for _ in range(4)))
    joint, parts = parts_of(model, 4, once=Once(weights=True))
    sent, passed, steps = [], [], []

    def watch(step):
        send, pass_on = step.send, step.pass_on
        step.send = lambda action, *args: (sent.append(action), send(action, *args))
        step.pass_on = lambda action, values: (passed.append(action), pass_on(action, values))
        steps.append(step)

    run(joint, parts, model, schedule, 2, watch)
    turn = {Action("forward", 1, index) for index in range(4)}
    turn |= {Action("backward", 2, index, "input") for index in range(4)}
    assert set(passed) - set(sent) == turn
    assert not steps[0]._passed and not steps[0]._kept


def test_no_two_messages_have_one_tag():
    actions = [
        action for rank in range(4) for action in actions_of(Schedule(micro_batches=8, stages_per_rank=2), 4, rank)
    ]
    tags = [tag_of(action, index) for action in actions for index in range(16)]
    assert len(set(tags)) == len(tags) == 8 * 8 * 2 * 16
