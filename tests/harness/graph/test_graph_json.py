"""A finished graph goes to JSON and comes back as the very same code; what has no such form is refused by name."""

from __future__ import annotations

import json
import math
import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from bitproof.harness.graph import offload_operators
from bitproof.harness.graph.graph_json import UnkeptError, graph_from_json, graph_to_json
from bitproof.harness.graph.origin import META_KEY, Origin
from bitproof.harness.graph.writer import CHUNK_KEY

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def small_graph() -> GraphModule:
    """One node of each kind of target, and one argument of each kind."""
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    rows = graph.call_function(aten.sym_size.int, (x, 0))
    half = graph.call_function(operator.floordiv, (rows, 2))
    largest = graph.call_function(torch.sym_max, (half, 1))
    product = graph.call_function(aten.mm.default, (x, weight))
    parts = graph.call_function(aten.split_with_sizes.default, (product, [largest, half], 0))
    part = graph.call_function(operator.getitem, (parts, 0))
    cast = graph.call_function(
        aten._to_copy.default,
        (part,),
        {"dtype": torch.float32, "device": torch.device("cpu"), "layout": torch.strided, "non_blocking": False},
    )
    clone = graph.call_function(aten.clone.default, (cast,), {"memory_format": torch.contiguous_format})
    clamped = graph.call_function(aten.clamp.default, (clone, -math.inf, math.inf))
    scaled = graph.call_function(aten.mul.Tensor, (clamped, -0.0))
    launched = graph.call_function(c10d.all_gather_into_tensor.default, (scaled, 2, "fsdp"))
    awaited = graph.call_function(c10d.wait_tensor.default, (launched,))
    host = graph.call_function(offload_operators.OFFLOAD, (awaited,))
    graph.output((awaited, [host, None]))
    product.meta |= {META_KEY: Origin("layers.0", "forward", "model.py:3"), CHUNK_KEY: 1}
    part.meta |= {META_KEY: Origin(None, "backward")}
    return GraphModule({}, graph)


def through_json(module: GraphModule) -> GraphModule:
    return graph_from_json(json.loads(json.dumps(graph_to_json(module))))


def test_a_graph_comes_back_as_the_same_code_with_every_nodes_place() -> None:
    module = small_graph()
    found = through_json(module)
    assert found.code == module.code
    places = [
        [(node.name, node.meta.get(META_KEY), node.meta.get(CHUNK_KEY)) for node in m.graph.nodes]
        for m in (module, found)
    ]
    assert places[0] == places[1]
    assert [node.target for node in found.graph.nodes] == [node.target for node in module.graph.nodes]


def test_it_comes_back_with_the_same_bits() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.mul.Tensor, (graph.call_function(aten.exp.default, (x,)), 0.1)))
    module, x = GraphModule({}, graph), torch.linspace(-3, 3, 101)
    assert through_json(module)(x).view(torch.int32).equal(module(x).view(torch.int32))


def test_an_argument_keeps_its_type_where_numbers_are_equal() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for value in (1, 1.0, True, (1,), [1], slice(None, 2), math.nan, "1"):
        graph.call_function(operator.getitem, (x, value))
    graph.output(None)
    found = [node.args[1] for node in through_json(GraphModule({}, graph)).graph.nodes if node.op == "call_function"]
    assert [repr(value) for value in found] == ["1", "1.0", "True", "(1,)", "[1]", "slice(None, 2, None)", "nan", "'1'"]


def test_graphs_nested_in_it_come_with_it() -> None:
    inner = Graph()
    inner.output(inner.call_function(aten.sin.default, (inner.placeholder("score"),)))
    graph = Graph()
    x = graph.placeholder("x")
    nested = graph.get_attr("score_0")
    graph.output(graph.call_function(torch.ops.higher_order.flex_attention, (x, x, x, nested, (), 1.0, {}, (), ())))
    module = GraphModule({"score_0": GraphModule({}, inner)}, graph)
    found = through_json(module)
    assert found.code == module.code and found.score_0.code == module.score_0.code


def _calls(target: Any, *args: Any) -> GraphModule:
    graph = Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"), *args), name="call"))
    return GraphModule({}, graph)


def _method() -> GraphModule:
    graph = Graph()
    graph.output(graph.call_method("sin", (graph.placeholder("x"),)))
    return GraphModule({}, graph)


def _tensor() -> GraphModule:
    graph = Graph()
    graph.output(graph.get_attr("constant"))
    return GraphModule({"constant": torch.ones(2)}, graph)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: _calls(torch.sin), "node call calls what is no operator"),
        (lambda: _calls(aten.sin), "node call calls what is no operator"),
        (_method, "node sin calls what is no operator"),
        (_tensor, "node constant reads what is no graph"),
        (lambda: _calls(aten.mul.Tensor, 1j), "an argument has no form as data"),
    ],
)
def test_what_has_no_form_as_data_is_refused(make: Any, what: str) -> None:
    with pytest.raises(UnkeptError) as error:
        graph_to_json(make())
    assert error.value.what == what


def test_a_foreign_place_is_refused() -> None:
    module = _calls(aten.sin.default)
    next(iter(module.graph.find_nodes(op="call_function", target=aten.sin.default))).meta["bitproof"] = {"chunk": 1}
    with pytest.raises(UnkeptError, match="node call has a foreign place"):
        graph_to_json(module)


def _changed(index: int, field: int, value: Any) -> Any:
    plain = graph_to_json(_calls(aten.sin.default))
    plain["nodes"][index][field] = value
    return plain


@pytest.mark.parametrize(
    "plain",
    [
        None,
        {},
        {"nodes": [[]], "places": [], "nested": {}},
        _changed(1, 2, "os.system"),
        _changed(1, 2, "load_library"),
        _changed(1, 2, "aten.sin"),
        _changed(1, 2, "aten.nosuch.default"),
        _changed(0, 2, "x, y=print('run')"),
        _changed(1, 0, "call_module"),
        _changed(1, 0, "get_attr"),
        _changed(1, 4, {"tuple": [{"node": 7}]}),
        _changed(1, 4, {"tuple": [{"dtype": "load"}]}),
        _changed(1, 4, {"tuple": [{"code": "1"}]}),
        _changed(1, 3, 5),
    ],
)
def test_values_that_say_no_graph_are_refused_and_nothing_in_them_is_run(plain: Any) -> None:
    with pytest.raises(UnkeptError, match="not a valid graph file"):
        graph_from_json(plain)


@pytest.mark.parametrize(("field", "value"), [(4, 3), (4, "x"), (4, []), (4, {"device": "cpu"}), (5, "x"), (5, [])])
def test_arguments_of_another_kind_are_refused_and_raise_nothing_else(field, value):
    node = ["call_function", "a", "aten.add.Tensor", None, {"tuple": []}, {"dict": {}}]
    node[field] = value
    with pytest.raises(UnkeptError, match="not a valid graph file"):
        graph_from_json({"nodes": [node], "places": [], "nested": {}})
