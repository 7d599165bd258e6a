"""What tracing left behind goes; what someone reads, or what does something, stays."""

from __future__ import annotations

import torch

from bitproof.harness.graph.passes.clean_up import clean_up
from tests.harness.graph.graphs import Sketch, listing

aten = torch.ops.aten


def test_detach_is_read_through() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    y = sketch.call(aten.sin.default, sketch.call(aten.detach.default, sketch.call(aten.alias.default, x)))
    module = clean_up(sketch.finish(y), sketch.context())
    assert listing(module) == ["sin = sin(x)", "return [sin]"]
    assert torch.equal(module(torch.ones(8))[0], torch.ones(8).sin())


def test_every_operator_that_gives_its_argument_is_read_through() -> None:
    sketch = Sketch()
    module = clean_up(sketch.finish(sketch.call(aten.lift_fresh.default, sketch.placeholder("x", 8))), sketch.context())
    assert listing(module) == ["return [x]"]


def test_a_detached_value_that_is_written_in_place_stays() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    written = sketch.call(aten.add_.Tensor, sketch.call(aten.detach.default, x), 1)
    module = clean_up(sketch.finish(written), sketch.context())
    assert listing(module) == ["detach = detach(x)", "add_ = add_(detach, 1)", "return [add_]"]


def test_a_graph_with_nothing_to_drop_comes_back_untouched() -> None:
    sketch = Sketch()
    module = sketch.finish(sketch.call(aten.sin.default, sketch.placeholder("x", 8)))
    nodes = list(module.graph.nodes)
    assert clean_up(module, sketch.context()) is module
    assert list(module.graph.nodes) == nodes
