"""Steps as calls over versioned values, and the memory of these values."""

from __future__ import annotations

import math
import operator

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from bitproof.harness.step.step_program import StepCall, StepProgram, Value
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def calls_of(step: StepProgram) -> dict[Node, StepCall]:
    return {call.node: call for call in step.calls}


def value_at(step: StepProgram, x: Node, reader: Node) -> Value:
    return step.value(x, calls_of(step)[reader].time)


def test_a_write_makes_a_version_that_later_calls_read_by_either_name() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    before = sketch.call(aten.neg.default, x)
    written = sketch.call(aten.add_.Tensor, x, 1)
    after = sketch.call(aten.mul.Tensor, x, written)
    step = StepProgram(sketch.finish(before, after))
    assert value_at(step, x, before) == value_at(step, x, written) == Value(x, 0)
    assert value_at(step, x, after) == value_at(step, written, after) == Value(x, 1)
    assert calls_of(step)[written].memory == calls_of(step)[before].uses, "the result of a write is what it wrote"
    assert calls_of(step)[before].memory != calls_of(step)[before].uses


def test_a_buffer_that_two_chunks_write_has_a_version_for_each() -> None:
    sketch = Sketch()
    counts, x = sketch.placeholder("counts", 8), sketch.placeholder("x", 8)
    chunks = [sketch.call(aten.add_.Tensor, counts, x), sketch.call(aten.add_.Tensor, counts, x)]
    step = StepProgram(sketch.finish(sketch.call(aten.neg.default, counts)))
    last = step.calls[-2].node
    assert [value_at(step, counts, reader).version for reader in (*chunks, last)] == [0, 1, 2]


def test_a_view_is_a_value_of_its_own_in_the_same_memory() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    view = sketch.call(aten.view.default, x, [2, 4])
    sketch.call(aten.zero_.default, x)
    read = sketch.call(aten.neg.default, view)
    step = StepProgram(sketch.finish(read))
    calls = calls_of(step)
    assert calls[read].uses == calls[view].memory == calls[view].uses
    assert value_at(step, view, read) == Value(view, 0), "a view that was made before the write is no new version"


def test_each_tensor_that_a_foreach_operator_writes_has_a_new_version() -> None:
    sketch = Sketch()
    x, y = sketch.placeholder("x", 8), sketch.placeholder("y", 8)
    sketch.call(aten._foreach_mul_.Scalar, [x, y], 2)
    read = sketch.call(aten.add.Tensor, x, y)
    step = StepProgram(sketch.finish(read))
    assert [value_at(step, each, read).version for each in (x, y)] == [1, 1]


def test_a_wait_returns_the_memory_that_its_collective_fills() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    launch = sketch.call(c10d.all_gather_into_tensor.default, x, 2, "fsdp")
    wait = sketch.call(c10d.wait_tensor.default, launch)
    step = StepProgram(sketch.finish(wait))
    calls = calls_of(step)
    assert calls[launch].uses != calls[launch].memory == calls[wait].memory
    effects = calls[wait].effects
    assert effects is not None and calls[wait].memory_of(effects.awaits) == calls[launch].memory


def test_each_result_of_a_call_has_its_own_memory_and_parts_of_a_tensor_share_one() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    several = sketch.call(aten.sort.default, x)
    sorted_, order = (sketch.call(operator.getitem, several, place) for place in range(2))
    parts = sketch.call(aten.split.Tensor, x, 4)
    first, second = (sketch.call(operator.getitem, parts, place) for place in range(2))
    calls = calls_of(StepProgram(sketch.finish(sorted_, order, first, second)))
    assert calls[sorted_].memory != calls[order].memory
    assert calls[first].memory == calls[second].memory == calls[parts].uses


def test_memory_is_last_used_by_its_last_reader_and_inputs_and_results_are_kept() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    middle = sketch.call(aten.neg.default, x)
    view = sketch.call(aten.view.default, middle, [2, 4])
    last = sketch.call(aten.exp.default, view)
    step = StepProgram(sketch.finish(last))
    calls = calls_of(step)
    assert [step.last_use[key] for key in calls[view].uses] == [calls[last].time]
    kept = [*calls[middle].uses, *calls[step.calls[-1].node].uses]
    assert {step.last_use[key] for key in kept} == {math.inf} and {*kept} == step.kept
    assert [str(step.made[key]) for key in calls[view].uses] == ["neg"]


def test_a_tensor_that_adopts_another_ones_memory_has_it_from_then_on() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    before = graph.call_function(aten.neg.default, (x,))
    adopting = graph.call_function(aten.set_.source_Tensor, (x, y))
    after = graph.call_function(aten.neg.default, (x,))
    graph.output((before, after))
    calls = calls_of(StepProgram(GraphModule(nn.Module(), graph)))
    own, others = (calls[adopting].memory_of([each]) for each in (x, y))
    assert calls[before].uses == own != others == calls[after].uses == calls[adopting].memory


def test_the_calls_of_a_nested_graph_use_the_memory_of_the_operands() -> None:
    inner = Graph()
    a = inner.placeholder("a")
    inner.output(inner.call_function(aten.view.default, (a, [8])))
    graph = Graph()
    x = graph.placeholder("x")
    nested = graph.call_module("nested", (x,))
    read = graph.call_function(aten.neg.default, (nested,))
    graph.output(read)
    root = nn.Module()
    root.add_module("nested", GraphModule(nn.Module(), inner))
    step = StepProgram(GraphModule(root, graph))
    calls = calls_of(step)
    [[view]] = calls[nested].bodies
    assert view.where == " (nested graph nested)" and view.time < calls[nested].time
    assert view.uses == calls[nested].uses == calls[read].uses == calls[nested].memory


def test_constants_under_the_same_name_are_one_memory() -> None:
    graph = Graph()
    first, second = graph.get_attr("table"), graph.get_attr("table")
    reads = [graph.call_function(aten.neg.default, (each,)) for each in (first, second)]
    graph.output(reads)
    root = nn.Module()
    root.register_buffer("table", torch.zeros(2))
    calls = calls_of(StepProgram(GraphModule(root, graph)))
    assert calls[reads[0]].uses == calls[reads[1]].uses != ()
