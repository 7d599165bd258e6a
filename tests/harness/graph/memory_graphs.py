"""A joint graph of two blocks by hand, and the memory passes run over it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from bitproof.harness.case import Memory
from bitproof.harness.graph.analysis.saved_activations import TAG_KEY
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.passes.offload import offload
from bitproof.harness.graph.passes.rematerialize import rematerialize
from bitproof.harness.graph.passes.tag_memory import tag_memory
from bitproof.harness.graph.pipeline import PassReport, build_pipeline, run_pipeline
from bitproof.harness.graph.tracing.trace import JointGraph
from tests.harness.graph.graphs import Sketch, context_of

aten = torch.ops.aten
N = 4


@dataclass
class TwoBlocks:
    """sin(x @ w) + x, twice, and gradients that read what each block computed; `n` maps roles to nodes."""

    sketch: Sketch
    module: GraphModule
    n: dict[str, Node]


def two_blocks() -> TwoBlocks:
    sketch = Sketch()
    x, w = sketch.placeholder("x", N, N), sketch.placeholder("w", N, N)
    n = {"x": x, "w": w, "in0": sketch.call(aten.neg.default, x, at="embedding")}
    for i in (0, 1):
        at, entering = f"layers.{i}", n[f"in{i}"]
        n[f"mm{i}"] = sketch.call(aten.mm.default, entering, w, at=at)
        n[f"sin{i}"] = sketch.call(aten.sin.default, n[f"mm{i}"], at=at)
        n[f"t{i}"] = sketch.call(aten.t.default, n[f"sin{i}"], at=at)
        n[f"in{i + 1}"] = sketch.call(aten.add.Tensor, n[f"sin{i}"], entering, at=at)
    n["loss"] = sketch.call(aten.sum.default, n["in2"], at="")
    g = sketch.call(aten.ones_like.default, n["in2"], at=None, backward=True)
    gradients = []
    for i in (1, 0):
        at = f"layers.{i}"
        cos = sketch.call(aten.cos.default, n[f"mm{i}"], at=at, backward=True)
        g = n[f"g{i}"] = sketch.call(aten.mul.Tensor, g, cos, at=at, backward=True)
        g = sketch.call(aten.mm.default, g, n[f"t{i}"], at=at, backward=True)
        gradients.append(sketch.call(aten.mm.default, n[f"in{i}"], g, at=at, backward=True))
    return TwoBlocks(sketch, sketch.finish(n["loss"], *gradients), n)


def context_with(sketch: Sketch, policy: Any, **settings: Any) -> PassContext:
    return replace(sketch.context(), memory=Memory(policy=policy, **settings))


def tags(module: GraphModule) -> dict[str, str]:
    """Each tagged node's tag, in the order of the graph."""
    return {node.name: node.meta[TAG_KEY] for node in module.graph.nodes if TAG_KEY in node.meta}


def rewritten(module: GraphModule, context: PassContext) -> GraphModule:
    """The graph after all memory passes of a policy."""
    module = tag_memory(module, context, blocks="layers.*")
    if context.memory.policy == "offload":
        module = offload(module, context, blocks="layers.*")
    return rematerialize(module, context)


def with_policy(
    joint: JointGraph, policy: Any, modules: str | None = None, dim: Any = "batch", **settings: Any
) -> tuple[GraphModule, list[PassReport]]:
    """A traced step after the whole pipeline, and what the passes report."""
    context = replace(context_of(joint, modules, dim), memory=Memory(policy=policy, **settings))
    return run_pipeline(joint.module, build_pipeline(context), context)


def run(module: GraphModule, *inputs: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [output.clone() for output in module(*(x.clone() for x in inputs))]
