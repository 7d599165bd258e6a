"""Makes the graph of a case's step for uses that do not run it on ranks: proofs, sensitivity and standalone files."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import Tensor

from bitproof.harness.case import TRACED, Case
from bitproof.harness.errors import UsageError
from bitproof.harness.graph.backend.device_constants import forget_device_index
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.tracing.trace import StepGraph, trace_fixed_step
from bitproof.harness.systems.graph import graph_of_program, prepare
from bitproof.harness.systems.graph_key import placed_case
from bitproof.harness.systems.graph_program import group_table
from bitproof.reference.chunking import chunk_modules
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.data import TextStream, text_source
from bitproof.reference.parallel import rank_order_group
from bitproof.reference.parallel.mesh import FSDP, Mesh
from bitproof.reference.pipeline_stages import micro_batches_of
from bitproof.reference.step import Trainer, build_sharded_model, mean_loss


def step_graph(
    case: Case, system: str, device: torch.device, options: GraphOptions, *, observed: bool = False
) -> tuple[StepGraph, GroupTable]:
    """Return a pair: the graph of a system's training step, and its process groups.

    `observed`: whether the graph of a traced system also returns the activations that the case records. Raises
    UsageError if the system cannot be traced.
    """
    case = placed_case(case)
    # Activations would be further outputs of the graph.
    case = case if observed else replace(case, observe=())
    if system in TRACED:
        return graph_of_program(case, prepare(case, device, options, system=system))
    if system not in ("eager", "eager_chunked"):
        raise UsageError(
            f"system {system} is not known as a graph",
            expected=f"{', '.join(TRACED)}, eager or eager_chunked",
            found=system,
        )
    mesh = Mesh(0, case.parallelism)
    model = build_sharded_model(case, mesh, torch.device("meta"), shares=True)
    if system == "eager_chunked":
        assert case.chunking is not None, "Case refuses eager_chunked without chunking"
        chunk_modules(model, case.chunking, folded=case.model.folded)
    graph = trace_fixed_step(
        model,
        lambda *tensors: mean_loss(model, case.model, StepInputs(*tensors)),
        StepInputs(*(torch.empty(case.input_shape, dtype=torch.int64, device="meta") for _ in StepInputs._fields)),
        gradient_seed=case.gradient_seed,
        device=device,
    )
    forget_device_index(graph.module, device)
    return graph, group_table(mesh)


def num_parameters(case: Case) -> int:
    """Return the number of parameter elements on rank 0, which has only its own shards."""
    model = build_sharded_model(case, Mesh(0, case.parallelism), torch.device("meta"), shares=True)
    return sum(x.numel() for x in model.parameters())


def read_inputs(case: Case, step: int) -> list[dict[str, Tensor]]:
    """Return each rank's inputs at a step, in rank order, as name of a graph input -> tensor.

    With micro-batches, these are the inputs of the first micro-batch.
    """
    documents, _ = text_source(case.batch.data)
    folded = case.model.folded
    ranks = [Mesh(rank, case.parallelism).coordinate(FSDP) for rank in range(case.parallelism.world_size)]
    size = case.parallelism.data_ranks
    steps = [TextStream(documents, case.batch, rank=r, world_size=size, folded=folded).step(step) for r in ranks]
    return [micro_batches_of(inputs, case.micro_batches)[0]._asdict() for inputs in steps]


def all_trainers(case: Case) -> list[Trainer]:
    """Return a trainer for each rank, all in this process, for callers that simulate collectives."""
    case = placed_case(case)
    ranks = range(case.parallelism.world_size)
    return [Trainer(case, Mesh(rank, case.parallelism), torch.device("cpu")) for rank in ranks]


def rank_order_group_source() -> str:
    text = inspect.getsource(rank_order_group)
    return text[text.index("class _FinishOnWait") :]
