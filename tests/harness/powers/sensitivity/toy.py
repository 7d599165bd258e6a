"""Small steps of two ranks, written by hand, as programs whose values are known."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule

from bitproof.harness.powers.sensitivity.lockstep import run_step
from bitproof.harness.powers.sensitivity.program import BUFFER, INPUT, PARAM, Program, add_graph

aten = torch.ops.aten
PARTITIONS = {"all": ((0, 1),)}


def program_of(build, sources=((PARAM, "w"), (INPUT, "x")), returned=(("loss", "loss"),)) -> Program:
    """What `build(graph, *placeholders)` makes of a step that returns what it returns."""
    graph = Graph()
    given = [graph.placeholder(name) for _, name in sources]
    graph.output(build(graph, *given))
    program = Program()
    add_graph(program, GraphModule(torch.nn.Module(), graph), sources, returned, PARTITIONS)
    return program


def product(graph, w, x):
    """The sum over both ranks of the first two of four products, and one more that is multiplied by zero."""
    y = graph.call_function(aten.mul.Tensor, (x, w))
    head = graph.call_function(aten.slice.Tensor, (y, 0, 0, 2))
    nothing = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.neg.default, (x,)), 0.0))
    tail = graph.call_function(aten.slice.Tensor, (nothing, 0, 0, 2))
    both = graph.call_function(aten.add.Tensor, (head, tail))
    summed = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (both, "sum", "all"))
    return [graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (summed,))]


VALUES = [
    {(PARAM, "w"): torch.tensor([1.0, 2.0, 3.0, 4.0]), (INPUT, "x"): torch.tensor([0.5, 1.5, 2.5, 3.5]) + rank}
    for rank in range(2)
]


def counted(graph, w, counts):
    """A buffer that is written twice, and read before, between and after."""
    before = graph.call_function(aten.mul.Tensor, (counts, 2.0))
    first = graph.call_function(aten.add_.Tensor, (counts, w))
    between = graph.call_function(aten.mul.Tensor, (first, 2.0))
    graph.call_function(aten.add_.Tensor, (counts, w))
    return [before, between, graph.call_function(aten.mul.Tensor, (counts, 2.0))]


COUNTED = ((PARAM, "w"), (BUFFER, "counts"))
THREE = (("loss", "loss"), ("grad", "a"), ("grad", "b"))


def by_name(program: Program, name: str):
    """The call of an operator: mul, and mul_1 for the second."""
    operator, _, turn = name.partition("_") if name[-1].isdigit() else (name, "", "0")
    return [call for call in program.calls if call.operator == operator][int(turn or 0)]


def run(build=product):
    """A program of two ranks and its values."""
    program = program_of(build)
    return program, run_step(program, VALUES)


def pair(graph, w, x):
    """One of a call's two results is read."""
    found = graph.call_function(aten.sort.default, (x,))
    return [graph.call_function(aten.mul.Tensor, (graph.call_function(operator.getitem, (found, 0)), w))]
