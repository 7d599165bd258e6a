"""Activations of a graph are shown as eager shows them, and the graph computes what it did."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from bitproof.harness.case import Boundary, Chunking
from bitproof.harness.errors import CaseError, PassError
from bitproof.harness.graph.graph_json import graph_from_json, graph_to_json
from bitproof.harness.graph.observation import (
    MARKS_KEY,
    Mark,
    activation,
    copy_marks,
    hand_on_lost_marks,
    marked_nodes,
    observe_activations,
    observed,
    observed_by,
)
from bitproof.harness.graph.pipeline import build_pipeline, run_pipeline
from bitproof.harness.graph.tracing.trace import trace_joint_step
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.reference.chunking import chunk_modules
from bitproof.reference.observed_activations import Activations
from tests.harness.graph.graphs import CPU, SEED, Applied, D, Layers, batch, context_of, mean_square, parameter

aten = torch.ops.aten


class Inner(nn.Module):
    """A block with a module in it, whose output it adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.product = Applied(lambda module, x: (x @ module.w).sin(), w=parameter(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.product(x)


def model_of() -> Layers:
    return Layers(Inner(), Inner())


def finished(model: nn.Module, patterns: list[str], modules: str | None, dim: str = "batch") -> GraphModule:
    joint = trace_joint_step(
        model,
        mean_square(model),
        [batch()],
        chunk_dim=("batch", "seq").index(dim),
        gradient_seed=SEED,
        device=CPU,
        observe=patterns,
    )
    context = context_of(joint, modules, dim)
    return run_pipeline(joint.module, build_pipeline(context), context)[0]


def shown_by_graph(model: nn.Module, module: GraphModule) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    with torch.no_grad(), observed_by(lambda kind, name, value: seen.update({name: value.clone()})):
        module(*(x.detach() for x in model.parameters()), batch())
    return seen


def shown_by_eager(model: nn.Module, patterns: list[str], chunking: Chunking | None) -> dict[str, Tensor]:
    if chunking:
        chunk_modules(model, chunking)
    seen: dict[str, Tensor] = {}
    with Activations(model, patterns).shown_to(lambda kind, name, value: seen.update({name: value.clone()})):
        loss = mean_square(model)(batch())
        torch.autograd.grad(loss, list(model.parameters()), torch.full_like(loss, SEED))
    return seen


@pytest.mark.parametrize(
    ("modules", "dim"),
    [("layers.*", "batch"), ("layers.*.product", "batch"), ("layers.*.product", "seq"), (None, "batch")],
)
def test_a_graph_shows_the_bits_that_eager_shows_under_the_same_names(modules: str | None, dim: str) -> None:
    model, patterns = model_of(), ["layers.**"]
    module = finished(model, patterns, modules, dim)
    chunking = Chunking(dim=dim, modules=modules) if modules else None  # type: ignore[arg-type]
    observe_activations(module, chunking)
    graph, eager = shown_by_graph(model, module), shown_by_eager(model, patterns, chunking)
    assert graph.keys() == eager.keys() and len(graph) == (12 if modules == "layers.*" else 8)
    assert all(torch.equal(graph[name], eager[name]) for name in eager)


def test_beside_what_looks_the_graph_is_the_one_that_nobody_observes() -> None:
    plain, looked_at = (finished(model_of(), patterns, "layers.*") for patterns in ([], ["layers.**"]))
    assert plain.code == looked_at.code, "marks change nothing that a pass does"
    assert observe_activations(plain, None) == 0
    assert observe_activations(looked_at, Chunking(dim="batch", modules="layers.*")) == 12
    for node in looked_at.graph.find_nodes(op="call_function", target=observed):
        looked_at.graph.erase_node(node)
    looked_at.recompile()
    assert plain.code == looked_at.code


def test_a_graph_that_looks_goes_to_disk_and_back() -> None:
    module = finished(model_of(), ["layers.*"], None)
    observe_activations(module, None)
    assert graph_from_json(graph_to_json(module)).code == module.code


def test_a_pattern_that_fits_no_module_is_refused_as_it_is() -> None:
    with pytest.raises(CaseError, match="'blocks' of what to observe matches no module"):
        finished(model_of(), ["blocks"], None)


def test_without_an_observer_nothing_is_shown_and_the_innermost_is_the_one() -> None:
    seen: list[str] = []
    observed("a", [torch.ones(1)])
    with observed_by(lambda kind, name, value: seen.append(f"outer {name}")):
        with observed_by(lambda kind, name, value: seen.append(f"inner {name}")):
            observed("b", [torch.ones(1)])
        observed("c", [torch.ones(1)])
    assert seen == ["inner b", "outer c"]


def test_chunks_are_joined_with_chunk_0_first_and_a_whole_is_cut_in_half() -> None:
    first, second = torch.zeros(1, 2), torch.ones(1, 2)
    assert torch.equal(activation([first, second], 0), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert torch.equal(activation([torch.cat([first, second])], 0, 1), second)
    assert torch.equal(activation([first]), first)


def marked(mark: Mark, *chunks: int | None) -> GraphModule:
    """A graph of one input and a node for each chunk, each marked."""
    graph = Graph()
    x = graph.placeholder("x")
    for chunk in chunks:
        node = graph.call_function(aten.neg.default, (x,))
        node.meta |= {MARKS_KEY: (mark,)} | ({} if chunk is None else {CHUNK_KEY: chunk})
    graph.output((x,))
    return GraphModule({}, graph)


def described(module: GraphModule) -> list[str]:
    return [
        f"{node.args[0]} {[part.name for part in node.args[1]]} {node.args[2]} {node.args[3]}"
        for node in module.graph.find_nodes(op="call_function", target=observed)
    ]


def test_outside_of_chunked_modules_a_whole_is_shown_or_what_is_joined() -> None:
    chunking = Chunking(dim="batch", modules="layers.*.moe")
    mark = Mark(Boundary("layers.0", "forward"), 0, True)
    for chunks, expected in {
        (None,): "layers.0@forward ['neg_default'] None None",
        (0, 1): "layers.0@forward ['neg_default', 'neg_default_1'] 0 None",
        (0, 1, None): "layers.0@forward ['neg_default_2'] None None",
    }.items():
        module = marked(mark, *chunks)
        assert observe_activations(module, chunking) == 1
        assert described(module) == [expected]
    lost = marked(mark, 0)
    assert observe_activations(lost, chunking) == 0, "its record will be missing"


def test_in_a_chunked_module_each_chunk_is_shown_or_a_half_of_the_whole() -> None:
    chunking = Chunking(dim="seq", modules="layers.*.moe")
    mark = Mark(Boundary("layers.0.moe.router", "forward"), 1, True)
    module = marked(mark, 0, 1)
    observe_activations(module, chunking)
    name = "layers.0.moe.router@forward.chunk"
    assert sorted(described(module)) == [f"{name}0 ['neg_default'] None None", f"{name}1 ['neg_default_1'] None None"]
    module = marked(mark, None)
    observe_activations(module, chunking)
    assert sorted(described(module)) == [f"{name}0 ['neg_default'] 1 0", f"{name}1 ['neg_default'] 1 1"]
    module = marked(mark._replace(dim=None, carries=False), None)
    observe_activations(module, chunking)
    assert sorted(described(module)) == [f"{name}0 ['neg_default'] None None", f"{name}1 ['neg_default'] None None"]


@pytest.mark.parametrize(("module", "chunks"), [("layers.0", (0, 1)), ("layers.0.moe.router", (None,))])
def test_what_cannot_be_joined_or_cut_is_refused(module: str, chunks: tuple[int | None, ...]) -> None:
    mark = Mark(Boundary(module, "forward"), None, True)
    with pytest.raises(PassError, match=f"cannot observe {module}@forward"):
        observe_activations(marked(mark, *chunks), Chunking(dim="batch", modules="layers.*.moe"))


def test_marks_are_handed_to_what_stands_for_a_node() -> None:
    one, other = (Mark(Boundary(name, "forward"), None, False) for name in "ab")
    graph = Graph()
    first, second = graph.placeholder("x"), graph.placeholder("y")
    copy_marks(first, second)
    assert MARKS_KEY not in second.meta
    first.meta[MARKS_KEY], second.meta[MARKS_KEY] = (one,), (other,)
    copy_marks(first, second)
    assert second.meta[MARKS_KEY] == (other, one)


def test_what_somebody_s_pass_puts_in_a_marked_node_s_place_is_what_the_boundary_shows() -> None:
    def graph_with_mark() -> tuple[GraphModule, Node, Node]:
        graph = Graph()
        x = graph.placeholder("x")
        node = graph.call_function(aten.sin.default, (x,))
        node.meta |= {MARKS_KEY: ("a mark",), CHUNK_KEY: 1}
        reader = graph.call_function(aten.mul.Tensor, (x, node))
        graph.output(reader)
        return GraphModule(nn.Module(), graph), node, reader

    module, node, reader = graph_with_mark()
    marked = marked_nodes(module.graph)
    with module.graph.inserting_before(node):
        new = module.graph.call_function(aten.cos.default, (node.args[0],))
    node.replace_all_uses_with(new)
    hand_on_lost_marks(module.graph, marked)
    assert MARKS_KEY not in new.meta, "the node is still there, whoever reads it"
    module.graph.erase_node(node)
    hand_on_lost_marks(module.graph, marked)
    assert (new.meta[MARKS_KEY], new.meta[CHUNK_KEY]) == (("a mark",), 1)

    module, node, reader = graph_with_mark()
    marked = marked_nodes(module.graph)
    for call in (reader, node):
        call.replace_all_uses_with(call.args[0])
        module.graph.erase_node(call)
    hand_on_lost_marks(module.graph, marked)
    assert not any(MARKS_KEY in call.meta for call in module.graph.nodes), (
        "with its readers gone, nothing stands for it"
    )
