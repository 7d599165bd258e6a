"""Regions: which nodes of a step are one module's in one direction and chunk, and which are nobody's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from bitproof.harness.graph.backend.compiled_regions import made_of_parameters, marked_by
from bitproof.harness.graph.operators import operator_name
from bitproof.harness.graph.origin import META_KEY, RECOMPUTED_KEY, Origin
from tests.harness.graph.graphs import Applied, Layers, chunked, parameter, trace

aten = torch.ops.aten


def scaled(module: Any, x_BSD: Tensor) -> Tensor:
    module.calls.add_(1)
    torch._assert_async(module.calls.sum() > 0)
    return x_BSD.exp() * module.w.to(torch.bfloat16).float()


def step(chunks: str | None) -> GraphModule:
    model = Layers(*(Applied(scaled, w=parameter(8), calls=torch.zeros(3)) for _ in range(2)))
    return chunked(trace(model), chunks)


def regions_of(module: GraphModule, *patterns: str) -> dict[Node, str]:
    region_of = marked_by(patterns, module.graph)
    return {node: region for node in module.graph.nodes if (region := region_of(node)) is not None}


def test_a_region_is_of_one_module_one_direction_and_one_chunk() -> None:
    regions = regions_of(step("layers.*"), "layers.1")
    assert set(regions.values()) == {
        *(f"layers.1 {direction}, chunk {chunk}" for direction in ("forward", "backward") for chunk in (0, 1)),
        *(f"layers.1 {direction}, chunk None" for direction in ("forward", "backward")),  # what joins the chunks
    }
    counts = Counter(operator_name(node) for node, region in regions.items() if "forward" in region)
    assert counts["exp"] == counts["mul"] == 2


def test_the_first_pattern_that_matches_shows_the_region_and_others_have_none() -> None:
    module = step(None)
    assert {region.split()[0] for region in regions_of(module, "layers.*").values()} == {"layers.0", "layers.1"}
    assert regions_of(module, "layers.1", "layers.*") == regions_of(module, "layers.*")
    assert not regions_of(module, "layers.2", "norm")


def test_what_parameters_alone_make_writes_and_checks_are_left_out() -> None:
    module = step(None)
    marked = regions_of(module, "layers.*")
    names = {operator_name(node) for node in marked}
    assert {"exp", "mul"} <= names and not names & {"add_", "_assert_async"}
    casts = [node for node in module.graph.nodes if operator_name(node) == "_to_copy" and node not in marked]
    assert casts and set(casts) <= made_of_parameters(module.graph)


def test_what_backward_repeats_is_apart_from_what_it_repeats() -> None:
    module = step(None)
    exp = next(node for node in module.graph.nodes if node.target is aten.exp.default)
    exp.meta[RECOMPUTED_KEY] = True
    assert regions_of(module, "layers.0")[exp] == "layers.0 forward again, chunk None"


def test_collectives_and_sizes_are_nobodys() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(4)
    double = graph.call_function(aten.mul.Tensor, (x, 2))
    launch = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (double, "sum", "somebody"))
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (launch,))
    size = graph.call_function(aten.sym_size.int, (wait, 0))
    for node, value in ((double, x.meta["val"]), (launch, x.meta["val"]), (wait, x.meta["val"]), (size, 4)):
        node.meta |= {"val": value, META_KEY: Origin("layers.0", "forward")}
    graph.output([wait])
    assert list(regions_of(GraphModule({}, graph), "layers.*")) == [double]
