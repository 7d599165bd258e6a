"""Small models whose graphs are cut into stages, and run: all ranks in one process, with a box for the messages."""

from __future__ import annotations

import torch

from bitproof.harness.case import StageMap
from bitproof.harness.graph.staged.cut_graph import cut
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.harness.graph.staged.orders import actions_of
from bitproof.harness.graph.staged.placed_calls import NOTHING_ONCE
from bitproof.harness.graph.staged.staged_step import StagedStep, tag_of
from tests.harness.graph.graphs import CPU, Applied, D, batch, parameter, trace


def scaled(module, x):
    module.seen.add_(x.shape[0])
    return x + torch.tanh(x * module.weight) @ module.matrix


def layer():
    return Applied(scaled, weight=parameter(D), matrix=parameter(D, D), seen=torch.zeros(1))


def parts_of(model, num_stages, num_layers=None, once=NOTHING_ONCE):
    joint = trace(model)
    cuts = Cuts(num_stages, num_layers or len(model.layers))
    return joint, cut(joint.module, cuts, joint.chunk_symbol, once)


class InOneProcess(StagedStep):
    """All ranks of a pipeline: messages go through a box."""

    def __init__(self, parts, actions, stage_map=None):
        # Without neighbours on one rank, by default: each stage has a rank.
        super().__init__(parts, actions, (), stage_map or StageMap(512), CPU)
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


def run(joint, parts, model, schedule, ranks, strike=lambda step: None):
    state = {name: x.detach().clone() for name, x in model.state_dict(keep_vars=True).items()}
    names = [*joint.parameter_names, *joint.buffer_names]
    step = InOneProcess(parts, all_actions(schedule, ranks), schedule.stage_map(ranks))
    strike(step)
    micro_batches = [batch(seed=index) for index in range(schedule.micro_batches)]
    inputs = [dict(zip(parts.placeholders[len(names) :], [x], strict=True)) for x in micro_batches]
    with torch.no_grad():
        losses, gradients = step(
            {place: state[name] for place, name in zip(parts.placeholders, names, strict=False)}, inputs
        )
    assert not step.box, "every message was read"
    return (
        losses,
        [gradients[name] for each in parts.gradients for name in each.values()],
        [state[name] for name in joint.buffer_names],
    )


def bits(values):
    return [[x.numpy().tobytes() for x in each] for each in values]
