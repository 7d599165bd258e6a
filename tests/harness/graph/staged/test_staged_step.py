"""A step in stages: all ranks in one process, with a box for the messages."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.case import Schedule
from bitproof.harness.graph.staged.actions import actions_of
from bitproof.harness.graph.staged.staged_step import StagedStep, tag_of
from tests.harness.graph.graphs import CPU, Layers, batch
from tests.harness.graph.staged.stages import layer, parts_of


class InOneProcess(StagedStep):
    """All ranks of a pipeline: messages go through a box."""

    def __init__(self, parts, actions):
        super().__init__(parts, actions, None, CPU)
        self.box = {}

    def send(self, action, index, value):
        self.box[tag_of(action, index)] = value.clone()

    def receive(self, sender, index, crossing):
        value = self.box.pop(tag_of(sender, index))
        assert (tuple(value.shape), value.dtype) == (crossing.shape, crossing.dtype)
        return value


def all_actions(schedule, ranks):
    """The actions of all ranks, one after the other in an order in which they can run."""
    waiting, done = [actions_of(schedule, ranks, rank) for rank in range(ranks)], []
    last = ranks * schedule.stages_per_rank - 1
    while any(waiting):
        for actions in waiting:
            while actions and _can_run(actions[0], done, last):
                done.append(actions.pop(0))
    return done


def _can_run(action, done, last):
    if action.half == "forward":
        return action.stage == 0 or action._replace(stage=action.stage - 1) in done
    return action.stage == last or action._replace(stage=action.stage + 1) in done


def run(joint, parts, model, schedule, ranks):
    state = {name: x.detach().clone() for name, x in model.state_dict(keep_vars=True).items()}
    names = [*joint.parameter_names, *joint.buffer_names]
    step = InOneProcess(parts, all_actions(schedule, ranks))
    micro_batches = [batch(seed=index) for index in range(schedule.micro_batches)]
    inputs = [dict(zip(parts.placeholders[len(names) :], [x], strict=True)) for x in micro_batches]
    with torch.no_grad():
        losses, gradients = step(
            {place: state[name] for place, name in zip(parts.placeholders, names, strict=False)}, inputs
        )
    assert not step.box, "every message was read"
    return losses, [gradients[name] for name in parts.gradients], [state[name] for name in joint.buffer_names]


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


def bits(values):
    return [[x.numpy().tobytes() for x in each] for each in values]


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


def test_no_two_messages_have_one_tag():
    actions = [
        action for rank in range(4) for action in actions_of(Schedule(micro_batches=8, stages_per_rank=2), 4, rank)
    ]
    tags = [tag_of(action, index) for action in actions for index in range(16)]
    assert len(set(tags)) == len(tags) == 8 * 8 * 2 * 16
