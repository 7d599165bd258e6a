"""What a reordering may move, and what it may not."""

from __future__ import annotations

import operator

import torch

from bitproof.harness.graph.analysis.dependencies import dependencies, reorder
from tests.harness.graph.graphs import Sketch, calls, listing

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def test_without_a_key_nothing_moves() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2)
    first, second = sketch.call(aten.neg.default, x), sketch.call(aten.abs.default, x)
    module = sketch.finish(first, second)
    before = listing(module)
    reorder(module)
    assert listing(module) == before


def test_the_smallest_key_that_is_ready_comes_first() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2)
    first = sketch.call(aten.neg.default, x)
    second = sketch.call(aten.abs.default, first)
    third = sketch.call(aten.sin.default, x)
    module = sketch.finish(second, third)
    reorder(module, {first: 2, second: 0, third: 1}.__getitem__)
    assert listing(module) == ["sin = sin(x)", "neg = neg(x)", "abs_1 = abs(neg)", "return [abs_1, sin]"]


def test_readers_of_a_buffer_stay_on_their_side_of_a_write() -> None:
    sketch = Sketch()
    buffer = sketch.placeholder("buffer", 2)
    view = sketch.call(aten.view.default, buffer, [2])
    early = sketch.call(aten.neg.default, view)
    write = sketch.call(aten.add_.Tensor, view, 1)
    late = sketch.call(aten.abs.default, buffer)
    second_write = sketch.call(aten.add_.Tensor, buffer, 2)
    module = sketch.finish(early, late, write, second_write)
    found = dependencies(module.graph)
    assert found[write] == {view, early}
    assert found[late] == {buffer, write}
    assert found[second_write] == {buffer, write, late}
    reorder(module, {late: 0, second_write: 1, write: 2, early: 3, view: 4}.__getitem__)
    order = [line.split(" =")[0] for line in listing(module)]
    assert order == ["view", "neg", "add_", "abs_1", "add__1", "return [neg, abs_1, add_, add__1]"]


def test_what_a_collective_sends_is_not_written_before_its_wait() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2)
    launch = sketch.call(c10d.all_to_all_single.default, sketch.call(aten.view.default, x, [2]), [1, 1], [1, 1], "ep")
    wait = sketch.call(c10d.wait_tensor.default, launch)
    write = sketch.call(aten.add_.Tensor, x, 1)
    module = sketch.finish(wait, write)
    assert wait in dependencies(module.graph)[write]
    reorder(module, lambda node: {launch: 1, wait: 2}.get(node, 0))
    assert [node.name for node in calls(module, "all_to_all_single", "wait_tensor", "add_")] == [
        "all_to_all_single",
        "wait_tensor",
        "add_",
    ]


def test_random_draws_keep_their_order() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2)
    first, second = sketch.call(aten.bernoulli.default, x), sketch.call(aten.bernoulli.default, x)
    module = sketch.finish(first, second)
    reorder(module, {first: 1, second: 0}.__getitem__)
    assert listing(module)[:2] == ["bernoulli = bernoulli(x)", "bernoulli_1 = bernoulli(x)"]


def test_a_graph_that_is_out_of_order_is_put_in_order() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2)
    first = sketch.call(aten.neg.default, x)
    parts = sketch.call(aten.split.Tensor, first, 1)
    part = sketch.call(operator.getitem, parts, 0)
    last = sketch.call(aten.abs.default, part)
    module = sketch.finish(last)
    x.append(last)
    reorder(module)
    module.graph.lint()
    assert [line.split(" =")[0] for line in listing(module)] == ["neg", "split", "getitem", "abs_1", "return [abs_1]"]
