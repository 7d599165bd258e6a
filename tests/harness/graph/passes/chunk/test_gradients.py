"""The chain from a gradient output back to where the gradient was first computed."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from bitproof.harness.graph.passes.chunk.gradients import gradient_outputs, reduction_tail
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def tail_of(*steps: Any, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """The tail of a chain that starts at a sum and takes these steps, each (operator, arguments, keywords)."""
    sketch = Sketch()
    node: Node = sketch.call(aten.sum.dim_IntList, sketch.placeholder("x", sketch.n, 8, dtype=dtype), [0])
    for target, args, kwargs in steps:
        node = sketch.call(target, node, *args, **kwargs)
    sketch.finish(node)
    return [x.name for x in reduction_tail(node)]


WIDEN = (aten._to_copy.default, (), {"dtype": torch.float32})
NARROW = (aten._to_copy.default, (), {"dtype": torch.bfloat16})
PAD = (aten.constant_pad_nd.default, ([0, 4],), {})
VIEW = (aten.view.default, ([2, 4],), {})
FLAT = (aten.view.default, ([8],), {})
SCATTER = (c10d.reduce_scatter_tensor.default, ("sum", 4, "DP"), {})
REDUCE = (c10d.all_reduce.default, ("sum", "TP"), {})
WAIT = (c10d.wait_tensor.default, (), {})
NEGATE = (aten.neg.default, (), {})


def test_cast_pad_reduction_and_wait_are_the_tail_last_first() -> None:
    assert tail_of(WIDEN, PAD, SCATTER, WAIT) == ["wait_tensor", "reduce_scatter_tensor", "constant_pad_nd", "_to_copy"]


def test_views_between_reductions_belong_to_the_tail_and_views_before_them_do_not() -> None:
    assert tail_of(VIEW, WIDEN, FLAT, SCATTER, WAIT) == ["wait_tensor", "reduce_scatter_tensor", "view_1", "_to_copy"]


def test_a_gradient_without_cast_or_reduction_has_no_tail() -> None:
    assert tail_of() == tail_of(VIEW) == tail_of(NEGATE) == []


def test_the_tail_stops_at_another_operator() -> None:
    assert tail_of(WIDEN, NEGATE, SCATTER, WAIT) == ["wait_tensor", "reduce_scatter_tensor"]


def test_the_tail_stops_at_another_collective() -> None:
    assert tail_of(WIDEN, REDUCE, WAIT) == ["wait_tensor"]


def test_the_tail_stops_at_a_narrowing_cast() -> None:
    assert tail_of(NARROW, dtype=torch.float32) == []
    assert tail_of(NARROW, SCATTER, WAIT, dtype=torch.float32) == ["wait_tensor", "reduce_scatter_tensor"]


def test_the_tail_stops_where_someone_else_reads() -> None:
    sketch = Sketch()
    gradient = sketch.call(aten.sum.dim_IntList, sketch.placeholder("x", sketch.n, 8, dtype=torch.bfloat16), [0])
    cast = sketch.call(aten._to_copy.default, gradient, dtype=torch.float32)
    scattered = sketch.call(c10d.reduce_scatter_tensor.default, cast, "sum", 4, "DP")
    sketch.call(aten.neg.default, cast)
    sketch.finish(scattered)
    assert [x.name for x in reduction_tail(scattered)] == ["reduce_scatter_tensor"]


def test_all_outputs_but_the_loss_are_gradients() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    loss, gradient = sketch.call(aten.sum.default, x), sketch.call(aten.neg.default, x)
    module = sketch.finish(loss, gradient)
    assert [node.name for node in gradient_outputs(module.graph.output_node())] == ["neg"]
