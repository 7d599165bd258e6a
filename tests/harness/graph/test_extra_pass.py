"""A user's pass: loaded from a file or a module, put at its place, run without metadata, and refused by name."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from bitproof.harness.errors import PassError, UsageError
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.extra_pass import ExtraPass, insert, load_pass
from bitproof.harness.graph.graph_options import PassSpec, parse_pass
from bitproof.harness.graph.origin import UNKNOWN, origin_of
from bitproof.harness.graph.pipeline import build_pipeline, run_pipeline
from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    Sketch,
    batch,
    calls,
    context_of,
    differing,
    listing,
    parameter,
    run_eager,
    run_graph,
    trace,
)

aten = torch.ops.aten


def extra(function: Callable[..., Any], side: str = "after", anchor: str = "concretize_symbols") -> ExtraPass:
    return ExtraPass(function, "0" * 64, PassSpec(source="test", function="f", side=side, anchor=anchor))


def sketched() -> tuple[GraphModule, PassContext]:
    """sum(neg(sin(x)))"""
    sketch = Sketch()
    x = sketch.placeholder("x", 4, 6)
    neg = sketch.call(aten.neg.default, sketch.call(aten.sin.default, x))
    return sketch.finish(sketch.call(aten.sum.default, neg)), sketch.context()


def replace_neg(module: GraphModule, target: Any, *args: Any) -> None:
    """Put `target(sin, *args)` where neg was, without any metadata."""
    (neg,) = calls(module, "neg")
    with module.graph.inserting_after(neg):
        new = module.graph.call_function(target, (neg.args[0], *args))
    neg.replace_all_uses_with(new)
    module.graph.erase_node(neg)


def run(function: Callable[..., Any]) -> GraphModule:
    """The sketched graph after a user's pass, verified."""
    module, context = sketched()
    return run_pipeline(module, [extra(function)], context)[0]


# -- loading ------------------------------------------------------------------------------------------


def test_a_file_is_loaded_from_the_bytes_that_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    path_before, modules_before, hashes = list(sys.path), set(sys.modules), []
    for number in (1, 2):  # files of one length, written within one tick of the clock
        file.write_text(f"def drop(module):\n    return {number}\n")
        loaded = load_pass(parse_pass(f"{file}:drop"))
        assert (loaded.__name__, loaded.sha256) == ("drop", hashlib.sha256(file.read_bytes()).hexdigest())
        assert loaded._function(None) == number
        hashes.append(loaded.sha256)
    assert sys.path == [str(tmp_path), *path_before], "it finds the modules beside it, as `python mine.py` does"
    assert set(sys.modules) - modules_before == {f"mine_{sha256[:8]}" for sha256 in hashes}, "no import finds them"


def test_a_module_is_imported_and_the_functions_own_file_hashed() -> None:
    loaded = load_pass(parse_pass("bitproof.harness.graph.pipeline:clean_up"))
    source = Path(sys.modules["bitproof.harness.graph.passes.clean_up"].__file__ or "")
    assert (loaded.__name__, loaded.sha256) == ("clean_up", hashlib.sha256(source.read_bytes()).hexdigest())


def test_an_unknown_module_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        load_pass(parse_pass("no_such_module:drop"))
    assert str(error.value) == (
        "UsageError: the module of extra pass drop cannot be imported\n"
        "  found: ModuleNotFoundError: No module named 'no_such_module'\n"
        "  fix: run from the folder that holds it, install it, or name a file: path/to/file.py:function"
    )


@pytest.mark.parametrize(("name", "found"), [("nothing_of_the_kind", "nothing"), ("ExtraPass", "type")])
def test_what_is_no_function_of_the_module_is_refused(name: str, found: str) -> None:
    with pytest.raises(UsageError) as error:
        load_pass(parse_pass(f"bitproof.harness.graph.extra_pass:{name}"))
    assert str(error.value) == (
        f"UsageError: bitproof.harness.graph.extra_pass has no function {name}\n"
        "  expected: a function of a GraphModule, and of a PassContext if it takes two\n"
        f"  found: {found}"
    )


# -- places -------------------------------------------------------------------------------------------


def named(name: str, side: str, anchor: str) -> ExtraPass:
    def function(module: GraphModule) -> None: ...

    function.__name__ = name
    return extra(function, side, anchor)


def names(column: list[Any]) -> list[str]:
    return [run_pass.__name__ for run_pass in column]


COLUMN = [named(name, "", "") for name in ("clean_up", "chunk", "concretize_symbols", "backend")]


def test_each_pass_stands_where_it_was_asked_to_in_the_order_given() -> None:
    extras = [
        named("a", "after", "chunk"),
        named("b", "after", "chunk"),
        named("c", "before", "chunk"),
        named("d", "before", "chunk"),
        named("e", "after", "a"),
    ]
    assert " ".join(names(insert(COLUMN, extras))) == "clean_up c d chunk a e b concretize_symbols backend"
    assert names(COLUMN) == ["clean_up", "chunk", "concretize_symbols", "backend"]


def test_the_default_place_is_before_a_backend() -> None:
    spec = parse_pass("m:drop")
    column = insert(COLUMN, [named("drop", spec.side, spec.anchor)])
    assert names(column) == ["clean_up", "chunk", "concretize_symbols", "drop", "backend"]


def test_an_unknown_place_is_refused_with_the_column() -> None:
    with pytest.raises(UsageError) as error:
        insert(COLUMN, [named("drop", "before", "bucket")])
    assert str(error.value) == (
        "UsageError: there is no pass bucket for drop to stand before\n"
        "  expected: clean_up, chunk, concretize_symbols, backend\n"
        "  found: @before=bucket"
    )


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        insert(COLUMN, [named("chunk", "after", "chunk")])
    assert str(error.value) == (
        "UsageError: two passes are named chunk\n"
        "  expected: a unique name for every pass, as reports and errors use it\n"
        "  found: pass list clean_up, chunk, concretize_symbols, backend\n"
        "  fix: rename the function"
    )


# -- running ------------------------------------------------------------------------------------------


def test_a_pass_in_place_needs_neither_metadata_nor_a_recompile() -> None:
    module = run(lambda module: replace_neg(module, aten.cos.default))
    assert listing(module) == ["sin = sin(x)", "cos_default = cos(sin)", "sum_1 = sum(cos_default)", "return [sum_1]"]
    (cos,) = calls(module, "cos")
    assert cos.meta["val"].shape == (4, 6)
    assert origin_of(cos) == UNKNOWN
    x = torch.randn(4, 6)
    assert torch.equal(module(x)[0], x.sin().cos().sum())


def test_a_pass_that_changes_nothing_leaves_the_graph_and_every_value_as_they_were() -> None:
    module, context = sketched()
    before = listing(module), [node.meta.get("val") for node in module.graph.nodes]
    result, _ = run_pipeline(module, [extra(lambda module: None)], context)
    after = listing(result), [node.meta.get("val") for node in result.graph.nodes]
    assert result is module and before[0] == after[0]
    assert all(x is y for x, y in zip(before[1], after[1], strict=True))


def test_a_pass_may_take_the_context_and_return_a_new_module() -> None:
    seen = []

    def rebuild(module: GraphModule, context: PassContext) -> GraphModule:
        seen.append(context)
        return GraphModule(module, torch.fx.Graph.__deepcopy__(module.graph))

    module, context = sketched()
    result, _ = run_pipeline(module, [extra(rebuild)], context)
    assert result is not module and listing(result) == listing(module)
    assert seen == [context]


def test_readers_of_a_changed_value_get_new_values_and_others_keep_theirs() -> None:
    module, context = sketched()
    kept = calls(module, "sin")[0].meta["val"]
    result, _ = run_pipeline(module, [extra(lambda m: replace_neg(m, aten.to.dtype, torch.float64))], context)
    assert calls(result, "sum")[0].meta["val"].dtype == torch.float64
    assert calls(result, "sin")[0].meta["val"] is kept


def test_a_call_that_now_reads_something_else_gets_a_new_value() -> None:
    def flatten(module: GraphModule) -> None:
        (total,) = calls(module, "sum")
        total.target, total.args = aten.sum.dim_IntList, (total.args[0], [1])

    assert calls(run(flatten), "sum")[0].meta["val"].shape == (4,)


def test_readers_get_new_values_though_they_read_the_same_node_as_before() -> None:
    def widen(module: GraphModule) -> None:
        (neg,) = calls(module, "neg")
        neg.target, neg.args = aten.to.dtype, (neg.args[0], torch.float64)

    assert calls(run(widen), "sum")[0].meta["val"].dtype == torch.float64


def test_a_pass_before_chunk_keeps_the_chunk_symbol_and_the_bits() -> None:
    def twice(module: GraphModule) -> None:
        (mul, *_) = calls(module, "mul")
        with module.graph.inserting_after(mul):
            new = module.graph.call_function(aten.clone.default, (mul,))
        mul.replace_all_uses_with(new)
        new.args = (mul,)

    model, x = Layers(Applied(lambda m, x: x * m.w, w=parameter(D))), batch()
    joint = trace(model, x)
    context = context_of(joint, "layers.*")
    column = insert(build_pipeline(context), [extra(twice, "before", "chunk")])
    module, reports = run_pipeline(joint.module, column, context)
    assert [report.name for report in reports] == ["clean_up", "twice", "chunk", "concretize_symbols", "measure_memory"]
    assert reports[1].settings == {"sha256": "0" * 64}
    assert reports[1].changed == {"clone": [0, 1]}
    assert not differing(run_graph(module, joint, model, x), run_eager(model, x, "layers.*"))


def test_a_value_read_from_data_is_followed() -> None:
    def rows(module: GraphModule) -> None:
        replace_neg(module, aten.nonzero.default)

    (nonzero,) = calls(run(rows), "nonzero")
    assert str(nonzero.meta["val"].shape[0]).startswith("u")


# -- refusals -----------------------------------------------------------------------------------------


def test_another_return_value_is_refused() -> None:
    def count(module: GraphModule) -> int:
        return len(module.graph.nodes)

    with pytest.raises(PassError) as error:
        run(count)
    assert str(error.value) == (
        "PassError: count did not return a graph\n"
        "  expected: a GraphModule, or None after changing the given one in place\n"
        "  found: int\n"
        "  came from: pass count"
    )


def test_a_pass_that_raises_is_named() -> None:
    def fail(module: GraphModule) -> None:
        raise KeyError("no such node")

    with pytest.raises(KeyError) as error:
        run(fail)
    assert error.value.__notes__ == ["  in pass: fail"]


def test_a_call_that_does_not_run_is_refused_with_its_node() -> None:
    def break_shapes(module: GraphModule) -> None:
        replace_neg(module, aten.view.default, [5, 5])

    with pytest.raises(PassError) as error:
        run(break_shapes)
    lines = str(error.value).splitlines()
    assert lines[:2] == [
        "PassError: node `view_default` (aten.view.default) does not run on the values it reads",
        "  expected: arguments that the operator takes",
    ]
    assert lines[2].startswith("  found: RuntimeError: shape '[5, 5]' is invalid for input of size 24")
    assert lines[3] == "  came from: pass break_shapes"


def test_a_graph_out_of_order_is_refused() -> None:
    def swap(module: GraphModule) -> None:
        (sin,), (neg,) = calls(module, "sin"), calls(module, "neg")
        neg.append(sin)

    with pytest.raises(PassError, match="the graph is malformed") as error:
        run(swap)
    assert error.value.where == "pass swap"
