"""Loss and gradients of the stages that a rank has, by the parts of a graph that was cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitproof.harness.graph.staged.actions import actions_of
from bitproof.harness.graph.staged.cut_graph import CutGraph
from bitproof.harness.graph.staged.stage_messages import refuse_waiting
from bitproof.harness.graph.staged.staged_step import StagedStep
from bitproof.harness.torch_operators import below_autograd
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.parallel.mesh import PIPELINE, pipeline_group
from bitproof.reference.pipeline_stages import mean_of_losses, micro_batches_of
from bitproof.reference.step import GradientFunction, Trainer


def staged_gradients(
    trainer: Trainer, graph: CutGraph, parameter_names: Sequence[str], buffer_names: Sequence[str]
) -> GradientFunction:
    """The function for a trainer, which runs it as its `graph`. All ranks call this together.

    Names are those of the whole graph's parameters and buffers, in the order of its inputs; a rank has some of them.
    """
    case, mesh = trainer.case, trainer.mesh
    assert case.schedule is not None, "only a step in micro-batches is cut"
    pp = case.parallelism.pp
    actions = [actions_of(case.schedule, pp, rank) for rank in range(pp)]
    refuse_waiting(actions, case.stages)
    groups = [pipeline_group(mesh) for _ in range(2)] if pp > 1 else []
    trainer.graph = step = StagedStep(graph, actions[mesh.coordinate(PIPELINE)], groups, mesh.device)
    names = [*parameter_names, *buffer_names]
    own = {**trainer.parameters, **dict(trainer.model.named_buffers())}
    kept, read = graph.placeholders[: len(names)], graph.placeholders[len(names) :]
    state = {place: own[name] for place, name in zip(kept, names, strict=True) if name in own}
    given_as = dict(zip(parameter_names, graph.gradients, strict=True))

    def gradients(inputs: StepInputs) -> tuple[Tensor | None, dict[str, Tensor]]:
        parts = [dict(zip(read, part, strict=True)) for part in micro_batches_of(inputs, case.micro_batches)]
        with torch.no_grad(), below_autograd():
            losses, found = step(state, parts)
            loss = mean_of_losses(losses) if losses else None
        return loss, {name: found[given_as[name]] for name in trainer.parameters}

    return gradients
