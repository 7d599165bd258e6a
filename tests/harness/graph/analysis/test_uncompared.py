from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule

from bitproof.harness.graph.analysis.uncompared import count_uncompared
from bitproof.harness.graph.observation import observed


def counted(build):
    """What is counted in a graph that is built by hand; each call has a value."""
    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    for node in graph.nodes:
        node.meta["val"] = None if node.target is observed else torch.empty(2)
    return count_uncompared(GraphModule(torch.nn.Module(), graph))


def test_what_a_graph_returns_is_compared_and_the_calls_on_the_way_are_not():
    def build(graph, x):
        half = graph.call_function(torch.mul, (x, 0.5))
        return (graph.call_function(torch.sin, (half,)), graph.call_function(torch.cos, (half,)))

    assert counted(build) == (1, 3)


def test_a_call_of_which_one_part_is_returned_is_compared():
    def build(graph, x):
        parts = graph.call_function(torch.split, (x, 1))
        return (graph.call_function(operator.getitem, (parts, 0)),)

    assert counted(build) == (0, 1)


def test_an_activation_that_is_shown_is_compared():
    def build(graph, x):
        half = graph.call_function(torch.mul, (x, 0.5))
        graph.call_function(observed, ("layers.0@forward", [half]))
        return (graph.call_function(torch.sin, (half,)),)

    assert counted(build) == (0, 2)
