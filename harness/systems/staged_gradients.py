"""Computes loss and gradients in pipeline stages, with a graph that was cut into a part for each stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitproof.harness.graph.staged.cut_graph import CutGraph
from bitproof.harness.graph.staged.orders import actions_of
from bitproof.harness.graph.staged.stage_messages import NUM_GROUPS, refuse_waiting
from bitproof.harness.graph.staged.staged_step import StagedStep
from bitproof.harness.torch_operators import below_autograd
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.parallel.mesh import PIPELINE, pipeline_group
from bitproof.reference.pipeline_stages import mean_of_losses, micro_batches_of, stage_of
from bitproof.reference.step import GradientFunction, Trainer
from bitproof.reference.tied_stages import copies_of


def staged_gradients(
    trainer: Trainer, graph: CutGraph, parameter_names: Sequence[str], buffer_names: Sequence[str]
) -> GradientFunction:
    """Return a function that computes a trainer's loss and gradients in pipeline stages.

    - Sets `trainer.graph` to the step that runs in stages.
    - Creates process groups, so all ranks must call this together.
    - `parameter_names`, `buffer_names`: inputs of the whole graph, in order. A rank has only some of these tensors.

    If two stages share a parameter, each has a copy, and only the first copy is an input of the graph.
    """
    case, mesh = trainer.case, trainer.mesh
    assert case.schedule is not None, "only a step in micro-batches is cut"
    pp = case.parallelism.pp
    actions = [actions_of(case.schedule, pp, rank) for rank in range(pp)]
    # Before any rank runs: a deadlock would only show as a run that never ends.
    refuse_waiting(actions, case.stage_map)
    # In a single group, neighbours that wait for each other's messages would deadlock.
    groups = [pipeline_group(mesh) for _ in range(NUM_GROUPS)] if pp > 1 else []
    trainer.graph = step = StagedStep(
        graph,
        actions[mesh.coordinate(PIPELINE)],
        groups,
        case.stage_map,
        mesh.device,
        getattr(torch, case.precision.reduce),
    )
    # `step.join` is looked up at each call, as a fault may replace it.
    step.join, trainer.join_tied = trainer.join_tied, lambda gradients: step.join(gradients)
    names = [*parameter_names, *buffer_names]
    own = {**trainer.parameters, **dict(trainer.model.named_buffers())}
    # The graph's inputs are first the state, which stays, then the data of a micro-batch.
    kept, read = graph.placeholders[: len(names)], graph.placeholders[len(names) :]
    places = dict(zip(names, kept, strict=True))
    # A rank with only the second copy of a shared parameter passes it as the input of the first copy.
    first_of = copies_of(case, own)
    copies = {first: own[copy] for copy, first in first_of.items() if first in places and copy not in places}
    state = {places[name]: x for name, x in {**copies, **own}.items() if name in places}
    by_stage = dict(zip(parameter_names, graph.gradients, strict=True))

    def given_as(name: str) -> str:
        # If several stages compute a gradient of the parameter, take the output of its own stage.
        each = by_stage[name if name in by_stage else first_of[name]]
        return each.get(stage_of(name, graph.cuts.num_layers, graph.cuts.num_stages)) or next(iter(each.values()))

    gradient_names = {name: given_as(name) for name in trainer.parameters}

    def gradients(inputs: StepInputs) -> tuple[Tensor | None, dict[str, Tensor]]:
        parts = [dict(zip(read, part, strict=True)) for part in micro_batches_of(inputs, case.micro_batches)]
        with torch.no_grad(), below_autograd():
            losses, found = step(state, parts)
            # Only a rank with the last stage has losses.
            loss = mean_of_losses(losses) if losses else None
        return loss, {name: found[given] for name, given in gradient_names.items()}

    return gradients
