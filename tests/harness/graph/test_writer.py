"""Nodes get the metadata that their operators give, although equal calls run once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from bitproof.builtin_cases.chunking import moe_seq, transformer_batch
from bitproof.harness.case import Case
from bitproof.harness.graph.symbols import expression, free_symbols
from bitproof.harness.graph.writer import CHUNK_KEY, GraphWriter
from tests.harness.graph.graphs import Applied, D, Layers, Sketch, chunked, parameter, trace
from tests.small import small
from tests.traced import prepare_traced

aten = torch.ops.aten


def layout(value: Any) -> Any:
    """What metadata says of a value; each symbol is replaced by one name, since every run makes new ones."""
    if isinstance(value, Tensor):
        numbers = [*value.shape, *value.stride(), value.storage_offset()]
        known = ["data-dependent" if free_symbols(n) else int(n) for n in numbers]
        return (value.dtype, value.device, value.is_conj(), value.is_neg(), known)
    if isinstance(value, (tuple, list)):
        return [layout(item) for item in value]
    return "data-dependent" if free_symbols(value) else value


def executed(module: GraphModule) -> dict[Node, Any]:
    """Every node's value when each is run by itself on fake values, none remembered."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    env: dict[Node, Any] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        with torch.no_grad(), mode, mode.shape_env.ignore_fresh_unbacked_symbols():  # type: ignore[union-attr]
            if node.op == "placeholder":
                env[node] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
    return env


def wrong(module: GraphModule) -> list[str]:
    return [n.name for n, value in executed(module).items() if layout(value) != layout(n.meta["val"])]


@pytest.mark.parametrize("case", [small(transformer_batch), small(moe_seq)], ids=lambda case: case.name)
def test_remembered_layouts_are_those_of_running_every_node_of_the_tiny_model(case: Case) -> None:
    assert wrong(prepare_traced(case).module) == []


def test_a_layout_that_another_operator_gives_would_be_seen() -> None:
    module = chunked(trace(Layers(Applied(lambda m, x: x @ m.w, w=parameter(D, D)))), "layers.*")
    assert wrong(module) == []
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    node.meta["val"] = node.meta["val"].transpose(0, 1)
    assert wrong(module) == [node.name]


@pytest.fixture
def written() -> tuple[Sketch, GraphWriter, Node]:
    """A writer whose graph has one input, x of shape (4, 8), int64."""
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, 8, dtype=torch.int64)
    writer = GraphWriter(sketch.finish(x), sketch.symbol.symbol, 4)
    return sketch, writer, writer.placeholder(x)


def call(sketch: Sketch, writer: GraphWriter, target: Any, *args: Any, **kwargs: Any) -> Node:
    source = sketch.graph.create_node("call_function", target, name="source")
    return writer.call(source, args, kwargs)


def test_an_input_gets_the_symbols_number(written: tuple[Sketch, GraphWriter, Node]) -> None:
    *_, x = written
    assert x.meta["val"].shape == (4, 8) and x.meta["val"].stride() == (8, 1)


def test_one_as_integer_float_and_condition_give_their_own_dtypes(written: tuple[Sketch, GraphWriter, Node]) -> None:
    sketch, writer, x = written
    dtypes = [call(sketch, writer, aten.full.default, [2], one).meta["val"].dtype for one in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.bool, torch.int64]
    sums = [call(sketch, writer, aten.add.Tensor, x, one).meta["val"].dtype for one in (1, 1.0, True)]
    assert sums == [torch.int64, torch.float32, torch.int64]


def test_keywords_decide_too(written: tuple[Sketch, GraphWriter, Node]) -> None:
    sketch, writer, x = written
    dtypes = [call(sketch, writer, aten.sum.default, x, dtype=d).meta["val"].dtype for d in (torch.float64, None)]
    assert dtypes == [torch.float64, torch.int64]


def test_a_conjugate_view_is_not_taken_for_its_source(written: tuple[Sketch, GraphWriter, Node]) -> None:
    sketch, writer, x = written
    real = call(sketch, writer, aten.to.dtype, x, torch.complex64)
    conjugate = call(sketch, writer, aten._conj.default, real)
    flags = [call(sketch, writer, aten.view.default, y, [32]).meta["val"].is_conj() for y in (real, conjugate)]
    assert flags == [False, True]


def test_equal_calls_run_once(written: tuple[Sketch, GraphWriter, Node]) -> None:
    sketch, writer, x = written
    first, second = (call(sketch, writer, aten.neg.default, x) for _ in range(2))
    assert first.meta["val"] is second.meta["val"]


def num_runs(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many operators the chunk pass runs on fake values for a model of equal layers."""
    runs: list[Any] = []
    run = GraphWriter._run
    model = Layers(*(Applied(lambda m, x: (x @ m.w).relu(), w=parameter(D, D)) for _ in range(num_layers)))
    with monkeypatch.context() as patch:
        patch.setattr(GraphWriter, "_run", lambda self, target, *rest: runs.append(target) or run(self, target, *rest))
        chunked(trace(model), "layers.*")
    return len(runs)


def test_deeper_models_run_no_more_on_fake_values(monkeypatch: pytest.MonkeyPatch) -> None:
    shallow, deep = (num_runs(num_layers, monkeypatch) for num_layers in (3, 9))
    assert shallow == deep > 0


def test_each_reading_of_data_gives_a_symbol_of_its_own_that_is_not_the_chunk_symbol(
    written: tuple[Sketch, GraphWriter, Node],
) -> None:
    sketch, writer, x = written
    count = call(sketch, writer, aten.sum.default, x)
    symbols = {
        str(expression(call(sketch, writer, aten._local_scalar_dense.default, count).meta["val"])) for _ in range(2)
    }
    assert len(symbols) == 2
    assert str(sketch.symbol.symbol) not in symbols
    rows = {str(expression(call(sketch, writer, aten.nonzero.default, x).meta["val"].shape[0])) for _ in range(2)}
    assert len(rows) == 2


def test_a_chunks_node_says_so_in_name_and_metadata(written: tuple[Sketch, GraphWriter, Node]) -> None:
    sketch, writer, x = written
    source = sketch.graph.create_node("call_function", aten.neg.default, name="source")
    node = writer.call(source, (x,), {}, chunk=1)
    assert (node.name, node.meta[CHUNK_KEY]) == ("source_chunk1", 1)
    other = writer.call(source, (x,), {}, target=aten.abs.default)
    assert other.name == "source_abs" and CHUNK_KEY not in other.meta
