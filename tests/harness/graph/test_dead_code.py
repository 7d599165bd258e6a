"""Only calls that nobody reads and that change nothing are dropped."""

from __future__ import annotations

import torch

from bitproof.harness.graph.dead_code import drop_dead_code
from tests.harness.graph.graphs import Sketch, listing

aten = torch.ops.aten


def test_calls_that_nobody_reads_are_dropped_with_what_only_they_read() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, 8)
    sketch.call(aten.cos.default, sketch.call(aten.sin.default, x))
    sketch.call(aten.sym_size.int, x, 0)
    sketch.attribute("table", torch.ones(1))
    module = sketch.finish(sketch.call(aten.neg.default, x))
    drop_dead_code(module)
    assert listing(module) == ["neg = neg(x)", "return [neg]"]
    assert torch.equal(module(torch.ones(2, 8))[0], -torch.ones(2, 8))
    assert "cos" not in module.code, "the code was made anew"


def test_inputs_that_nobody_reads_stay() -> None:
    sketch = Sketch()
    sketch.placeholder("unused", 8)
    module = sketch.finish(sketch.placeholder("x", 8))
    drop_dead_code(module)
    assert [node.name for node in module.graph.nodes] == ["unused", "x", "output"]


def test_an_in_place_write_that_nobody_reads_stays() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    sketch.call(aten.add_.Tensor, x, 1)
    sketch.call(aten._foreach_add_.Scalar, [x], 1)
    module = sketch.finish(x)
    drop_dead_code(module)
    assert listing(module) == ["add_ = add_(x, 1)", "_foreach_add_ = _foreach_add_([x], 1)", "return [x]"]


def test_a_random_draw_that_nobody_reads_stays_because_the_next_one_depends_on_it() -> None:
    sketch = Sketch()
    sketch.call(aten.rand.default, [8])
    module = sketch.finish(sketch.call(aten.rand.default, [8]))
    drop_dead_code(module)
    assert listing(module) == ["rand = rand([8])", "rand_1 = rand([8])", "return [rand_1]"]
