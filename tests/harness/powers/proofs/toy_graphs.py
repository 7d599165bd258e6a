"""Small pairs of steps, proved against each other.

A step is a function of tensors; the first `parameters` of them are parameters, the others inputs. What it returns are
its outputs, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from bitproof.harness.graph.groups import Group, GroupTable
from bitproof.harness.powers.proofs.prover.answers import Proof, prove_graphs
from bitproof.harness.powers.proofs.prover.graphs.export import export_graph
from bitproof.harness.powers.proofs.prover.proof_data import Graph

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

PAIRS = ((0, 1), (2, 3))
GROUPS = GroupTable(
    {
        "all": Group("all", ((0, 1, 2, 3),)),
        "pairs": Group("pairs", PAIRS),
        "renamed": Group("renamed", PAIRS),
        "reversed": Group("reversed", ((1, 0), (3, 2))),
    }
)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def trace(step: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    """The step as the operators that it runs, those that write in place among them."""
    return make_fx(lambda *args: _listed(step(*args)), tracing_mode="fake")(*inputs)


def _listed(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def names_of(inputs: Sequence[Tensor], parameters: int = 1) -> list[str]:
    return [f"parameter {i}" if i < parameters else f"input {i - parameters}" for i in range(len(inputs))]


def as_data(module: GraphModule, inputs: Sequence[Tensor], parameters: int = 1) -> Graph:
    count = len(module.graph.output_node().args[0])
    return export_graph(module, names_of(inputs, parameters), inputs, [f"out {i}" for i in range(count)], GROUPS)


def compare(
    reference: Callable[..., Any], candidate: Callable[..., Any], *inputs: Tensor, parameters: int = 1, **options: Any
) -> Proof:
    sides = [as_data(trace(step, inputs), inputs, parameters) for step in (reference, candidate)]
    return prove_graphs(*sides, **options)


def verdicts(
    reference: Callable[..., Any], candidate: Callable[..., Any], *inputs: Tensor, **options: Any
) -> list[str]:
    """What is concluded of each output, what was written into inputs among them."""
    return [answer.verdict for answer in compare(reference, candidate, *inputs, **options).answers]


def verdict(reference: Callable[..., Any], candidate: Callable[..., Any], *inputs: Tensor, **options: Any) -> str:
    """What is concluded of the only output, or of all together."""
    return compare(reference, candidate, *inputs, **options).verdict
