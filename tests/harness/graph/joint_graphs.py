"""A small model that is exported as a joint graph, and that graph partitioned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from bitproof.harness.case import Chunking
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.passes.partition import partition
from bitproof.harness.graph.pipeline import build_pipeline, run_pipeline
from bitproof.harness.graph.tracing.export_joint import export_joint_step
from bitproof.harness.graph.tracing.trace import JointGraph
from tests.harness.graph.graphs import CPU, SEED, D, batch, context_of, mean_square, parameter


class Counting(nn.Module):
    """sin((x @ a).cos() @ b) * scale, scaled by how often it was called, which it counts."""

    def __init__(self, order: tuple[str, ...] = ("a", "b", "scale")) -> None:
        super().__init__()
        values = {"a": parameter(D, D), "b": nn.Parameter(parameter(D, D).detach().t().clone()), "scale": parameter(D)}
        for name in order:
            self.register_parameter(name, values[name])
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.sin((x @ self.a).cos() @ self.b) * self.scale * self.calls


def export(model: nn.Module, x: Tensor | None = None, chunking: Chunking | None = None) -> JointGraph:
    """The exported step of a model whose loss is the mean of its output's squares."""
    x = batch() if x is None else x
    dim = ("batch", "seq").index(chunking.dim) if chunking else 0
    return export_joint_step(
        model, mean_square(model), [x], gradient_seed=SEED, device=CPU, chunking=chunking, chunk_dim=dim
    )


def exported_in_chunks(model: nn.Module, modules: str, dim: Any = "batch") -> tuple[JointGraph, GraphModule]:
    """A model's step, exported, and its graph after the whole pipeline, with the chosen modules in chunks."""
    joint = export(model, chunking=Chunking(dim=dim, modules=modules))
    context = replace(context_of(joint, modules, dim), is_joint=True)
    return joint, run_pipeline(joint.module, build_pipeline(context), context)[0]


class Partitioned(NamedTuple):
    """A partitioned step, and what the pass said of it."""

    module: GraphModule
    joint: JointGraph
    facts: dict[str, Any]


def partitioned(model: nn.Module, by: str = "min_cut") -> Partitioned:
    """A model's step, exported and partitioned."""
    joint = export(model)
    context: PassContext = context_of(joint)
    return Partitioned(partition(joint.module, context, by=by), joint, dict(context.facts))
