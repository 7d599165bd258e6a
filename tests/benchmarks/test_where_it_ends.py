"""Outputs that no input shows: each is explained by the calls at which a difference ends."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tests.benchmarks.where_it_ends import steps_of, where_it_ends

aten = torch.ops.aten


def why(before: GraphModule, after: GraphModule, *inputs: Tensor) -> list[tuple[str, ...]]:
    """Of each output of the graph `after`, on these inputs and on their doubles, with two ranks."""
    runs = [[[x * factor for x in inputs]] * 2 for factor in (1.0, 2.0)]
    plain, changed = ([steps_of(module, each, {}) for each in runs] for module in (before, after))
    ends = where_it_ends(plain, changed, before, after)
    return [ends(node) for node in after.graph.output_node().args[0]]


def graph_of(make: Callable[[Graph, Node], list[Node]]) -> GraphModule:
    graph = Graph()
    graph.output(make(graph, graph.placeholder("x")))
    return GraphModule(torch.nn.Module(), graph)


def chosen(by: float) -> GraphModule:
    """How large is the largest number, and where is it? Each is negated."""

    def make(graph: Graph, x: Node) -> list[Node]:
        shifted = graph.create_node("call_function", aten.add.Tensor, (x, by), name="shifted")
        found = graph.create_node("call_function", aten.max.dim, (shifted, 0), name="largest")
        parts = [graph.create_node("call_function", operator.getitem, (found, place)) for place in (0, 1)]
        return [graph.call_function(aten.neg.default, (part,)) for part in parts]

    return graph_of(make)


def positive(function: Callable[..., Tensor], name: str) -> GraphModule:
    """What is positive of x, and x in another memory."""

    def make(graph: Graph, x: Node) -> list[Node]:
        other = graph.create_node("call_function", aten.clone.default, (x,), name="other")
        kept = graph.create_node("call_function", function, (x,), name=name)
        return [graph.create_node("call_function", aten.neg.default, (kept,), name="turned"), other]

    return graph_of(make)


def test_a_call_that_reads_other_bits_and_gives_the_same_is_named() -> None:
    assert why(chosen(0.0), chosen(0.5), torch.tensor([1.0, 3.0, 2.0]))[1] == (
        "largest[1] reads other bits, and gives the same",
    )


def test_a_call_that_was_put_in_is_named_where_its_readers_read_the_same() -> None:
    found = why(positive(aten.relu.default, "kept"), positive(aten.abs.default, "new"), torch.tensor([1.0, 2.0]))
    assert found[0] == ("new was put in or changed, and what reads it reads the same",)


def test_an_output_that_reads_nothing_of_the_change_says_so() -> None:
    found = why(positive(aten.relu.default, "kept"), positive(aten.abs.default, "new"), torch.tensor([-1.0, 2.0]))
    assert found[1] == ("no call that it reads was changed, or reads other bits",)


def test_what_is_written_over_before_it_is_read_is_named() -> None:
    def make(graph: Graph, x: Node, function: Callable[..., Tensor]) -> list[Node]:
        memory = graph.create_node("call_function", aten.mul.Tensor, (x, x), name="memory")
        first = graph.create_node("call_function", function, (memory,), name="first")
        graph.call_function(aten.zero_.default, (first,))
        return [graph.call_function(aten.neg.default, (first,))]

    def before(graph: Graph, x: Node) -> list[Node]:
        return make(graph, x, aten.clone.default)

    def after(graph: Graph, x: Node) -> list[Node]:
        found = make(graph, x, aten.clone.default)
        memory = next(node for node in graph.nodes if node.name == "memory")
        with graph.inserting_before(memory.next):
            graph.call_function(aten.zero_.default, (memory,))
        return found

    assert why(graph_of(before), graph_of(after), torch.tensor([2.0])) == [
        ("first gives other bits, which are written over before they are read",)
    ]


def test_one_set_of_inputs_is_enough_to_say_that_a_call_reads_otherwise() -> None:
    """Of x and its double only the double is beyond 3."""
    bounded = [
        graph_of(lambda graph, x: [graph.call_function(aten.gt.Scalar, (clamped(graph, x, most), 0.0))])
        for most in (3.0, 4.0)
    ]
    assert why(*bounded, torch.tensor([2.0])) == [("gt_scalar reads other bits, and gives the same",)]


def clamped(graph: Graph, x: Node, most: float) -> Node:
    return graph.create_node("call_function", aten.clamp.default, (x, None, most), name="clamped")
