"""The chunk symbol becomes a number everywhere, in nested graphs too, and every deferred condition is checked."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from bitproof.harness.errors import PassError
from bitproof.harness.graph.passes.chunk import chunk
from bitproof.harness.graph.passes.concretize_symbols import concretize_symbols
from bitproof.harness.graph.symbols import graph_carries
from bitproof.harness.graph.tracing.trace import Guard
from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    Sketch,
    assert_as_eager,
    batch,
    calls,
    chunked,
    context_of,
    differing,
    line_of,
    listing,
    names,
    parameter,
    run_eager,
    run_graph,
    symbols_left,
    trace,
)

aten = torch.ops.aten
wrap = torch.ops.higher_order.wrap


def scaling() -> Layers:
    return Layers(Applied(lambda m, x: x * m.w, w=parameter(D)))


def test_an_unchunked_step_gets_the_whole_number_and_keeps_its_bits() -> None:
    module = assert_as_eager(scaling(), None)
    assert listing(module) == [
        "mul = mul(arg1_1, arg0_1)",
        "pow_1 = pow(mul, 2)",
        "mean = mean(pow_1)",
        "full_like = full_like(mean, 0.125, pin_memory=False)",
        "expand = expand(full_like, [4, 6, 8])",
        "div = div(expand, 192)",
        "pow_2 = pow(mul, 1.0)",
        "mul_1 = mul(pow_2, 2.0)",
        "mul_2 = mul(div, mul_1)",
        "mul_3 = mul(mul_2, arg1_1)",
        "sum_1 = sum(mul_3, [0, 1], True)",
        "view = view(sum_1, [8])",
        "return [mean, view]",
    ]


def test_no_symbol_and_no_scalar_plumbing_is_left() -> None:
    joint = trace(Layers(nn.Linear(D, D), nn.LayerNorm(D)))
    assert symbols_left(joint.module, joint.chunk_symbol.symbol) and names(joint.module, "sym_size")
    module = concretize_symbols(joint.module, context_of(joint))
    assert not symbols_left(module, joint.chunk_symbol.symbol)
    assert not names(module, "sym_size", "sym_numel", "mul_sym", "floordiv")


def test_a_value_that_only_its_size_was_asked_of_is_dropped() -> None:
    model = Layers(Applied(lambda m, x: x * m.w / x.sin().numel(), w=parameter(D)))
    assert names(trace(model).module, "sin") == ["sin"]
    assert names(assert_as_eager(model, None), "sin") == []
    assert names(assert_as_eager(model, "layers.*"), "sin") == []


def test_a_graph_without_the_symbol_comes_back_untouched() -> None:
    joint = trace(scaling())
    context = context_of(joint)
    module = concretize_symbols(joint.module, context)
    before = listing(module)
    assert concretize_symbols(module, context) is module
    assert listing(module) == before


def test_scalars_keep_the_bits_of_eagers_arithmetic() -> None:
    assert_as_eager(Layers(Applied(lambda m, x: x * m.w * (x.shape[0] * 0.7 * 0.3) ** -0.5, w=parameter(D))), None)


def test_a_symbol_that_depends_on_data_stays_and_never_takes_the_chunk_symbols_name() -> None:
    def first_rows(module: Applied, x: torch.Tensor) -> torch.Tensor:
        n = (x[0, :, 0].detach() > -9).sum().item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[1])
        return x.narrow(1, 0, n) * module.w

    joint = trace(Layers(Applied(first_rows, w=parameter(D))))
    (scalar,) = calls(concretize_symbols(joint.module, context_of(joint)), "_local_scalar_dense")
    assert str(joint.chunk_symbol.symbol) == "u0"
    assert str(scalar.meta["val"]) not in ("u0", "4")


# -- guards -------------------------------------------------------------------------------------------


def test_conditions_true_of_the_whole_and_of_the_half_are_accepted() -> None:
    joint = trace(scaling())
    symbol = joint.chunk_symbol.symbol
    joint.guards.append(Guard(sympy.Gt(symbol, 1), None))
    chunked(joint, "layers.*")


def test_a_condition_true_of_the_whole_and_false_of_the_half_is_refused_where_chunks_run() -> None:
    def check(module: Applied, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] % 4 == 0)
        return x * module.w

    with pytest.raises(PassError) as error:
        chunked(trace(Layers(Applied(check, w=parameter(D)))), "layers.*")
    assert str(error.value) == (
        "PassError: a condition that tracing relied on is false for u0 = 2\n"
        "  expected: Eq(Mod(u0, 4), 0)\n"
        "  found: u0 = 2\n"
        f"  came from: {line_of(check, 1)}, pass concretize_symbols\n"
        "  fix: choose a size for which the model takes the traced path in every chunk"
    )


def test_the_same_condition_is_accepted_where_no_chunks_run() -> None:
    def check(module: Applied, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] % 4 == 0)
        return x * module.w

    assert_as_eager(Layers(Applied(check, w=parameter(D))), None)


def test_a_condition_false_of_the_whole_is_refused() -> None:
    joint = trace(scaling())
    symbol = joint.chunk_symbol.symbol
    context = replace(context_of(joint), guards=(Guard(sympy.Gt(symbol, 4), "model.py:3"),))
    with pytest.raises(
        PassError, match=r"is false for u0 = 4\n  expected: u0 > 4\n  found: u0 = 4\n  came from: model.py:3"
    ):
        concretize_symbols(joint.module, context)


# -- nested graphs ------------------------------------------------------------------------------------


def nested(sketch: Sketch) -> GraphModule:
    """y.view(n * 6, 8) + 1, its sizes computed inside."""
    outer, sketch.graph = sketch.graph, Graph()
    y = sketch.placeholder("y", sketch.n, 6, 8)
    rows = sketch.call(operator.mul, sketch.call(aten.sym_size.int, y, 0), 6)
    flat = sketch.call(aten.add.Tensor, sketch.call(aten.view.default, y, [rows, 8]), 1)
    sketch.graph.output((sketch.call(aten.view.default, flat, [sketch.call(aten.sym_size.int, y, 0), 6, 8]),))
    inner = GraphModule({}, sketch.graph)
    sketch.graph = outer
    return inner


def calling_a_nested_graph() -> tuple[GraphModule, Sketch]:
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, 6, 8)
    body = sketch.attribute("body", nested(sketch))
    result = sketch.graph.create_node("call_function", wrap, (body, x), name="wrapped")
    result.meta |= {"val": (x.meta["val"],), "origin": body.meta["origin"]}
    item = sketch.call(operator.getitem, result, 0)
    loss = sketch.call(aten.sum.default, item, at="")
    return sketch.finish(loss, item), sketch


def nested_listings(module: GraphModule) -> dict[str, list[str]]:
    return {name: listing(m) for name, m in module.named_modules() if name and isinstance(m, GraphModule)}


def test_a_nested_graph_loses_the_symbol_too() -> None:
    module, sketch = calling_a_nested_graph()
    symbol = sketch.symbol.symbol
    assert graph_carries(module.body, symbol)  # type: ignore[arg-type]
    result = concretize_symbols(module, sketch.context())
    assert not symbols_left(result, symbol)
    assert nested_listings(result) == {
        "body_4": ["view = view(y, [24, 8])", "add = add(view, 1)", "view_1 = view(add, [4, 6, 8])", "return [view_1]"]
    }
    x = batch()
    assert torch.equal(result(x)[1], x + 1)


def test_a_symbol_in_a_nested_graph_alone_is_found() -> None:
    module, sketch = calling_a_nested_graph()
    for node in module.graph.nodes:
        node.meta["val"] = 4
    assert graph_carries(module, sketch.symbol.symbol)


def test_a_nested_graph_in_a_chunked_module_is_written_for_half_the_size() -> None:
    module, sketch = calling_a_nested_graph()
    result = chunk(module, sketch.context("layers.*"))
    assert nested_listings(result)["body_2"][0] == "view = view(y, [12, 8])"
    assert not symbols_left(result, sketch.symbol.symbol)
    x = batch()
    assert torch.equal(result(x)[1], x + 1)


def test_concretizing_twice_gives_the_bits_of_once() -> None:
    model, x = scaling(), batch()
    joint = trace(model, x)
    context = context_of(joint)
    module: Any = concretize_symbols(concretize_symbols(joint.module, context), context)
    assert not differing(run_graph(module, joint, model, x), run_eager(model, x))
