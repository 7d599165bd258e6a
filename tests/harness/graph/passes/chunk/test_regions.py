"""Which regions the chunk pass matched: their live-ins and live-outs, in words, one line each."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.fx import GraphModule, Node

from bitproof.harness.graph.passes.chunk import chunk
from bitproof.harness.graph.passes.chunk.regions import regions_of
from tests.harness.graph.graphs import Applied, D, Layers, Sketch, context_of, parameter, trace

aten = torch.ops.aten


def sketched() -> tuple[GraphModule, Sketch]:
    """x -> [mul by w -> sin] -> sum: one region, of two nodes."""
    sketch = Sketch()
    x, w = sketch.placeholder("x", sketch.n, 6, 8), sketch.placeholder("w", 8, dtype=torch.bfloat16)
    y = sketch.call(aten.sin.default, sketch.call(aten.mul.Tensor, x, w))
    return sketch.finish(sketch.call(aten.sum.default, y, at="")), sketch


def roots_of(module: GraphModule) -> dict[Node, str | None]:
    return {node: "layers.0" if str(node) in ("mul", "sin") else None for node in module.graph.nodes}


def test_a_region_is_reported_with_the_dtypes_and_sizes_of_what_goes_in_and_comes_out() -> None:
    module, _ = sketched()
    assert list(map(str, regions_of(roots_of(module)))) == [
        "layers.0 (forward): 2 nodes; live-ins 2 (x float32[u0, 6, 8], w bfloat16[8]); "
        "live-outs 1 (sin float32[u0, 6, 8])"
    ]


def test_nothing_matched_is_no_region() -> None:
    module, _ = sketched()
    assert not list(regions_of(dict.fromkeys(module.graph.nodes)))


def test_the_pass_logs_one_line_for_each_module_and_direction(caplog: pytest.LogCaptureFixture) -> None:
    model = Layers(*(Applied(lambda m, x: x.sin() @ m.w, w=parameter(D, D)) for _ in range(2)))
    joint = trace(model)
    with caplog.at_level(logging.DEBUG):
        chunk(joint.module, context_of(joint, "layers.*"))
    lines = [line for line in caplog.messages if line.startswith("matched ")]
    assert [line.split(":")[0] for line in lines] == [
        "matched layers.0 (forward)",
        "matched layers.1 (forward)",
        "matched layers.1 (backward)",
        "matched layers.0 (backward)",
    ]
    assert all("live-ins " in line and "live-outs " in line for line in lines)
