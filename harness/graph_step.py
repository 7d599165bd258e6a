"""The system `graph`: the reference's own trainer, its gradients computed by the traced and rewritten step.

This module joins the reference and the graph pipeline; neither knows the other.

`prepare` traces and rewrites once; every rank then runs the same program. No process group is needed
for that: collectives are traced by group name, and names are the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from harness.case import Case
from harness.graph.context import PassContext
from harness.graph.pipeline import build_pipeline, run_pipeline
from harness.graph.trace import trace_joint_step
from reference.chunking import DIM_INDEX
from reference.loss import cross_entropy
from reference.parallel.mesh import EXPERT, Mesh
from reference.step import StepInputs, Trainer, WrapGradients, build_sharded_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphProgram:
    """A step ready to run on any rank. `code_hash` names the generated code; it is equal on all ranks.

    `seconds` holds "trace" and "passes" (a dict by pass name); `passes` one dict a pass, for the report.
    """

    module: GraphModule
    parameter_names: list[str]
    buffer_names: list[str]
    code_hash: str
    seconds: dict[str, Any]
    passes: list[dict[str, Any]]


def prepare(case: Case, device: torch.device) -> GraphProgram:
    """Trace the case's step for tensors on `device` and run the pipeline. Raises TraceError, ChunkError, PassError."""
    start = time.perf_counter()
    model = build_sharded_model(case, Mesh(0, case.parallelism), torch.device("meta"))
    shape = (case.batch.sequences, case.batch.seq_len)
    inputs = StepInputs(*(torch.empty(shape, dtype=torch.int64, device="meta") for _ in StepInputs._fields))

    def loss_function(tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor) -> Tensor:
        return cross_entropy(model(tokens_BS, positions_BS), labels_BS)

    joint = trace_joint_step(
        model,
        loss_function,
        inputs,
        chunk_dim=DIM_INDEX[case.chunking.dim if case.chunking else "batch"],
        gradient_seed=1 / case.parallelism.world_size,
        device=device,
    )
    trace_seconds = time.perf_counter() - start
    context = PassContext(
        chunk_symbol=joint.chunk_symbol,
        chunking=case.chunking,
        expert_groups=frozenset({EXPERT}),
        guards=tuple(joint.guards),
        memory=case.memory,
    )
    module, reports = run_pipeline(joint.module, build_pipeline(context), context)
    return GraphProgram(
        module=module,
        parameter_names=joint.parameter_names,
        buffer_names=joint.buffer_names,
        code_hash=hashlib.sha256(module.code.encode()).hexdigest(),
        seconds={"trace": trace_seconds, "passes": {report.name: report.seconds for report in reports}},
        passes=[dataclasses.asdict(report) for report in reports],
    )


def make_graph_system(
    case: Case, mesh: Mesh, device: torch.device, program: GraphProgram, wrap: WrapGradients
) -> Trainer:
    """A trainer whose gradients come from `program`. `wrap` may tamper with them."""
    trainer = Trainer(case, mesh, device)
    trainer.graph = program.module
    buffers = dict(trainer.model.named_buffers())
    state: list[Tensor] = [trainer.parameters[name] for name in program.parameter_names]
    state += [buffers[name] for name in program.buffer_names]

    def gradients(inputs: StepInputs) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            loss, *values = trainer.graph(*state, *inputs)
        return loss, dict(zip(program.parameter_names, values, strict=True))

    trainer.gradients = wrap(gradients)
    return trainer
