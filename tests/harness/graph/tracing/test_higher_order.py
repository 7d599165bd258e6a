"""Higher-order operators in a chunked module are refused by name, in the graph and in eager; elsewhere they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from bitproof.harness.case import Chunking
from bitproof.harness.errors import ChunkError
from bitproof.harness.graph.analysis.mixing import MixingCheck
from bitproof.harness.graph.tracing.trace import JointGraph, trace_joint_step
from tests.harness.graph.graphs import (
    CPU,
    SEED,
    Applied,
    D,
    Layers,
    batch,
    chunked,
    line_of,
    mean_square,
    parameter,
    trace,
)

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
"""Raised by torch's compiler, which traces a branch or a loop's body first."""


@pytest.fixture(autouse=True)
def compiler_reset() -> Iterator[None]:
    """Tracing `cond` and the others leaves state in torch's compiler, with which FlexAttention cannot be traced."""
    yield
    torch.compiler.reset()


def choose(module: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * 2.0, lambda x: x * 3.0, (x * module.w,))


def choose_by_state(module: Any, x: Tensor) -> Tensor:
    return torch.cond(module.w.sum() > 0, lambda x: x * 2.0, lambda x: x * 3.0, (x,)) * module.w


def choose_with_state(module: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * module.w, lambda x: x * 3.0, (x,))


def loop(module: Any, x: Tensor) -> Tensor:
    start = torch.zeros((), dtype=torch.int64)
    return x * module.w * while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2.0), (start, x.detach()))[1]


def by_rows(module: Any, x: Tensor) -> Tensor:
    return map_rows(lambda row: row * 2.0, x) * module.w


def running(module: Any, x: Tensor) -> Tensor:
    return scan(lambda carry, row: (carry + row, carry * row), x[0] * 0, x)[1] * module.w


def summed(module: Any, x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic") * module.w


CALLS: dict[str, list[Callable[[Any, Tensor], Tensor]]] = {
    "cond": [choose, choose_by_state, choose_with_state],
    "while_loop": [loop],
    "map": [by_rows],
    "scan": [running],
    "associative_scan": [summed],
}
EACH = [(name, function) for name, functions in CALLS.items() for function in functions]


def layer(function: Callable[[Any, Tensor], Tensor]) -> Applied:
    return Applied(function, w=parameter(D))


def traced(model: Layers, dim: Any, modules: str = "layers.*") -> JointGraph:
    chunking = Chunking(dim=dim, modules=modules)
    index = ("batch", "seq").index(dim)
    step = mean_square(model)
    return trace_joint_step(model, step, [batch()], chunk_dim=index, gradient_seed=SEED, device=CPU, chunking=chunking)


@pytest.mark.parametrize("dim", ["batch", "seq"])
@pytest.mark.parametrize(("name", "function"), EACH)
def test_a_higher_order_operator_in_a_chunked_module_is_refused_by_name(name: str, function: Any, dim: str) -> None:
    refusal = rf"^ChunkError: cannot chunk layers\.1: it calls {name}, whose nested graphs are not split in two\n"
    with pytest.raises(ChunkError, match=refusal):
        traced(Layers(layer(lambda m, x: x * m.w), layer(function)), dim)
    module = layer(function)
    with pytest.raises(ChunkError, match=refusal):
        MixingCheck(dim, ("batch", "seq").index(dim))("layers.1", module, module.forward, {"x": batch()})


def test_the_refusal_says_what_where_and_how_to_write_it() -> None:
    with pytest.raises(ChunkError) as error:
        traced(Layers(layer(choose)), "batch")
    assert str(error.value) == (
        "ChunkError: cannot chunk layers.0: it calls cond, whose nested graphs are not split in two\n"
        "  expected: a module without higher-order operators, except for flex_attention\n"
        "  found: node `cond`, which runs true_graph_0, false_graph_0\n"
        f"  came from: layers.0 (forward), {line_of(choose, 1)}\n"
        "  fix: write it without (a choice by data as torch.where, a loop as Python's for), or choose other modules"
    )


def test_a_higher_order_operator_in_another_module_is_not_refused() -> None:
    traced(Layers(layer(lambda m, x: x * m.w), layer(choose)), "batch", "layers.0")


def test_a_higher_order_operator_without_rows_is_not_refused() -> None:
    def scaled(module: Any, x: Tensor) -> Tensor:
        return x * torch.cond(module.w.sum() > 0, lambda w: w * 2.0, lambda w: w * 3.0, (module.w,))

    traced(Layers(layer(scaled)), "batch")
    module = layer(scaled)
    MixingCheck("batch", 0)("layers.0", module, module.forward, {"x": batch()})


def test_the_graph_pass_refuses_what_tracing_did_not() -> None:
    with pytest.raises(ChunkError, match=r"cannot chunk layers\.0: it calls cond"):
        chunked(trace(Layers(layer(choose))), "layers.*")
