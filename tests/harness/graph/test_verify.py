"""What must hold of a graph between passes, and the graphs of which it does not."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import sympy
import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.errors import PassError
from bitproof.harness.graph.stages import OPEN
from bitproof.harness.graph.tracing.trace import ChunkSymbol
from bitproof.harness.graph.verify import Facts
from tests.harness.graph.graphs import Sketch, verify

aten = torch.ops.aten
NO_SYMBOL = ChunkSymbol(sympy.Symbol("none"), 0)


@pytest.fixture
def module() -> GraphModule:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    return sketch.finish(sketch.call(aten.neg.default, sketch.call(aten.sin.default, x)))


def test_a_graph_in_order_with_values_and_origins_passes(module: GraphModule) -> None:
    verify(module)


def test_a_node_read_before_it_is_written_is_refused(module: GraphModule) -> None:
    _, sin, neg, _ = module.graph.nodes
    neg.append(sin)
    with pytest.raises(PassError) as error:
        verify(module)
    lines = str(error.value).splitlines()
    assert lines[:2] == ["PassError: the graph is malformed", "  expected: topological order"]
    assert lines[2].startswith("  found: Argument 'sin' of Node 'neg' was used before it has been defined!")


@pytest.mark.parametrize(("missing", "left"), [("val", "origin"), ("origin", "val")])
def test_a_call_without_value_or_origin_is_refused_by_name(module: GraphModule, missing: str, left: str) -> None:
    sin = list(module.graph.nodes)[1]
    del sin.meta[missing]
    with pytest.raises(PassError) as error:
        verify(module)
    assert str(error.value) == (
        "PassError: node `sin` (aten.sin.default) lacks metadata\n"
        "  expected: 'val' and 'origin' in node.meta\n"
        f"  found: {left}"
    )


def test_a_call_without_any_metadata_is_refused(module: GraphModule) -> None:
    list(module.graph.nodes)[1].meta.clear()
    with pytest.raises(PassError, match=r"found: nothing$"):
        verify(module)


def test_an_error_about_the_order_does_not_quote_the_whole_graph(module: GraphModule) -> None:
    _, sin, neg, _ = module.graph.nodes
    neg.append(sin)
    with pytest.raises(PassError) as error:
        verify(module)
    assert len(str(error.value).splitlines()) == 3


def test_a_method_call_is_refused_as_no_pass_knows_it(module: GraphModule) -> None:
    neg = list(module.graph.nodes)[2]
    with module.graph.inserting_after(neg):
        module.graph.call_method("abs", (neg,))
    with pytest.raises(PassError) as error:
        verify(module)
    assert str(error.value) == (
        "PassError: node `abs_1` is of an unknown kind\n"
        "  expected: placeholder or get_attr or call_function or output\n"
        "  found: call_method of abs\n"
        "  fix: write graph.call_function(torch.ops.aten....)"
    )


# -- symbols ------------------------------------------------------------------------------------------


@pytest.fixture
def sketch() -> Sketch:
    return Sketch()


def test_a_symbol_of_an_input_may_be_carried_until_it_is_resolved(sketch: Sketch) -> None:
    x = sketch.placeholder("x", sketch.n, 8)
    module = sketch.finish(sketch.call(aten.sum.default, sketch.call(aten.sin.default, x)))
    verify(module)
    with pytest.raises(PassError) as error:
        verify(module, resolved=sketch.symbol)
    assert str(error.value) == (
        "PassError: node `x` (x) carries a stray symbol\n"
        "  expected: no size that depends on u0, which is a number by now\n"
        "  found: shape ['u0', '8']\n"
        "  came from: no module (forward)"
    )


def test_a_resolved_symbol_is_found_in_a_call_a_scalar_and_a_stride(sketch: Sketch) -> None:
    with sketch.mode:
        strided = torch.empty_strided((2, 3), (sketch.n, 1))
    for value in (sketch.n, (torch.zeros(2), sketch.n), strided):
        module = sketch_of(value)
        with pytest.raises(PassError, match=r"node `sin` .* carries a stray symbol"):
            verify(module, resolved=sketch.symbol)


def sketch_of(value: object) -> GraphModule:
    """One call, which says that its value is `value`."""
    sketch = Sketch()
    call = sketch.call(aten.sin.default, sketch.placeholder("x", 8))
    call.meta["val"] = value
    return sketch.finish(call)


def test_a_symbol_read_from_data_may_be_carried_from_there_on(sketch: Sketch) -> None:
    x = sketch.placeholder("x", 8, dtype=torch.int64)
    assert sketch.mode.shape_env is not None
    with sketch.mode.shape_env.ignore_fresh_unbacked_symbols():
        rows = sketch.call(aten.nonzero.default, x)
    negated = sketch.call(aten.neg.default, rows)
    module = sketch.finish(sketch.call(aten.sum.default, negated))
    symbol = next(iter(rows.meta["val"].shape[0].node.expr.free_symbols))
    verify(module, resolved=sketch.symbol)
    rows.meta["val"] = torch.empty(3, 1)  # the operator no longer says that it made the symbol
    with pytest.raises(PassError) as error:
        verify(module)
    assert str(error.value) == (
        "PassError: node `neg` (aten.neg.default) carries a stray symbol\n"
        f"  expected: an input or an earlier operator that defines {symbol}\n"
        f"  found: shape ['{symbol}', '1']\n"
        "  came from: layers.0 (forward)"
    )


def test_a_symbol_that_only_a_later_node_defines_is_refused() -> None:
    shape_env = ShapeEnv()
    fresh = shape_env.create_unbacked_symint()
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    early, late = sketch.call(aten.sin.default, x), sketch.call(aten.sum.default, x)
    item = sketch.graph.create_node("call_function", aten._local_scalar_dense.default, (late,), name="item")
    item.meta |= {"val": fresh, "origin": late.meta["origin"]}
    module = sketch.finish(early)
    verify(module)
    early.meta["val"] = fresh
    with pytest.raises(PassError, match=r"node `sin` .* carries a stray symbol"):
        verify(module)
    early.prepend(item)
    item.prepend(late)
    verify(module)


def test_a_symbolic_number_among_the_arguments_is_refused(sketch: Sketch) -> None:
    x = sketch.placeholder("x", sketch.n, 8)
    size = sketch.call(aten.sym_size.int, x, 0)
    half = sketch.call(operator.floordiv, size, 2)
    view = sketch.call(aten.view.default, x, [half, 16])
    module = sketch.finish(view)
    verify(module)
    view.args = (x, [half.meta["val"], 16])
    with pytest.raises(PassError) as error:
        verify(module)
    assert str(error.value) == (
        "PassError: node `view` (aten.view.default) has a symbolic number among its arguments\n"
        "  expected: numbers, or nodes that compute them\n"
        "  found: args (x, [(u0//2), 16]), kwargs {}\n"
        "  came from: layers.0 (forward)"
    )
    view.args, view.kwargs = (x,), {"size": [half.meta["val"], 16]}
    with pytest.raises(PassError, match="has a symbolic number among its arguments"):
        verify(module)


def test_a_nested_graph_is_held_to_the_same_and_named(sketch: Sketch) -> None:
    inner = Sketch()
    y = inner.placeholder("y", inner.n, 8)
    body = inner.finish(inner.call(aten.sin.default, y))
    sketch.attribute("body", body)
    module = sketch.finish(sketch.call(aten.sin.default, sketch.placeholder("x", 8)))
    verify(module)
    with pytest.raises(PassError, match=r"^PassError: node `y` of nested graph body \(y\) carries a stray symbol"):
        verify(module, resolved=inner.symbol)
    y.meta["val"] = torch.empty(4, 8)
    with pytest.raises(PassError, match=r"^PassError: node `sin` of nested graph body .*carries a stray symbol"):
        verify(module)


# -- nested graphs ------------------------------------------------------------------------------------


@pytest.fixture
def body() -> tuple[GraphModule, GraphModule]:
    """A graph with one nested in it: y -> sin -> neg."""
    inner, outer = Sketch(), Sketch()
    nested = inner.finish(inner.call(aten.neg.default, inner.call(aten.sin.default, inner.placeholder("y", 8))))
    outer.attribute("body", nested)
    return outer.finish(outer.call(aten.sin.default, outer.placeholder("x", 8))), nested


def test_a_nested_graph_out_of_order_is_refused_and_named(body: tuple[GraphModule, GraphModule]) -> None:
    module, nested = body
    verify(module)
    _, sin, neg, _ = nested.graph.nodes
    neg.append(sin)
    with pytest.raises(PassError, match=r"^PassError: nested graph body is malformed\n  expected: topological order\n"):
        verify(module)


def test_a_node_of_an_unknown_kind_in_a_nested_graph_is_refused(body: tuple[GraphModule, GraphModule]) -> None:
    module, nested = body
    neg = list(nested.graph.nodes)[2]
    with nested.graph.inserting_after(neg):
        nested.graph.call_method("abs", (neg,))
    with pytest.raises(PassError, match=r"^PassError: node `abs_1` of nested graph body is of an unknown kind"):
        verify(module)


def test_a_nested_call_needs_a_value_and_no_origin(body: tuple[GraphModule, GraphModule]) -> None:
    module, nested = body
    sin = list(nested.graph.nodes)[1]
    del sin.meta["origin"]
    verify(module)
    del sin.meta["val"]
    with pytest.raises(PassError) as error:
        verify(module)
    assert str(error.value) == (
        "PassError: node `sin` of nested graph body (aten.sin.default) lacks metadata\n"
        "  expected: 'val' in node.meta\n"
        "  found: nothing"
    )


@pytest.mark.parametrize(
    ("target", "arguments", "found"),
    [
        (torch.ops._c10d_functional.all_reduce.default, ("sum", "tp"), "a collective"),
        (aten.bernoulli.default, (), "a random draw"),
        (aten.sin_.default, (), "a write in place"),
    ],
)
def test_a_nested_graph_that_does_more_than_compute_is_refused(
    target: Any, arguments: tuple[Any, ...], found: str, body: tuple[GraphModule, GraphModule]
) -> None:
    module, nested = body
    sin = list(nested.graph.nodes)[1]
    sin.target, sin.args = target, (*sin.args, *arguments)
    with pytest.raises(PassError) as error:
        verify(module)
    assert str(error.value) == (
        f"PassError: node `sin` of nested graph body ({target}) does more than compute from operands\n"
        "  expected: a pure function of the operator's arguments, since passes know it by its operands\n"
        f"  found: {found}\n"
        "  fix: hand the operator each tensor that its function reads; draw, write and communicate outside"
    )


def test_a_check_that_a_pass_drops_from_a_nested_graph_is_missed() -> None:
    inner, outer = Sketch(), Sketch()
    y = inner.placeholder("y", dtype=torch.bool)
    check = inner.call(aten._assert_async.msg, y, "y holds")
    outer.attribute("body", nested := inner.finish(y))
    module = outer.finish(outer.call(aten.sin.default, outer.placeholder("x", 8)))
    before = Facts.of(module)
    OPEN.check(module, before, NO_SYMBOL)
    nested.graph.erase_node(check)
    with pytest.raises(PassError, match="found: without _assert_async 'y holds'"):
        OPEN.check(module, before, NO_SYMBOL)
