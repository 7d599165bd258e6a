"""A partitioned step as two graphs."""

from __future__ import annotations

import torch

from bitproof.harness.graph.analysis.halves import HALF_KEY, divide, half_of, is_partitioned, run_halves, set_half
from tests.harness.graph.graphs import Layers, batch
from tests.harness.graph.joint_graphs import Counting, export, partitioned


def test_a_graph_says_whether_it_was_partitioned_and_a_call_where_it_runs() -> None:
    joint = export(Layers(Counting()))
    assert not is_partitioned(joint.module.graph)
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    assert [half_of(node) for node in calls] == [node.meta["origin"].direction for node in calls]
    set_half(calls[0], "backward")
    assert HALF_KEY not in calls[0].meta
    found = partitioned(Layers(Counting()))
    assert is_partitioned(found.module.graph)
    again = next(node for node in found.module.graph.nodes if "recomputed" in node.meta)
    assert (again.meta["origin"].direction, half_of(again)) == ("forward", "backward")


def test_both_halves_give_the_bits_of_the_whole() -> None:
    model = Layers(Counting(), Counting())
    found = partitioned(model)
    before = str(found.module.graph)
    halves = divide(found.module)
    assert str(found.module.graph) == before

    def inputs() -> list[torch.Tensor]:
        state = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
        names = [*found.joint.parameter_names, *found.joint.buffer_names]
        return [*(state[name] for name in names), batch()]

    whole, in_halves = inputs(), inputs()
    with torch.no_grad():
        expected = found.module(*whole)
        given = run_halves(halves.forward, halves.backward, halves.read_again, *in_halves)
    assert [x.numpy().tobytes() for x in (*given, *in_halves)] == [x.numpy().tobytes() for x in (*expected, *whole)]


def test_what_crosses_is_what_backward_reads_and_no_more() -> None:
    halves = divide(partitioned(Layers(Counting())).module)
    outputs = halves.forward.graph.output_node().args[0]
    assert len(outputs) == 1 + len(halves.saved) + ("loss" in halves.saved)
    inputs = halves.backward.graph.find_nodes(op="placeholder")
    assert len(inputs) == len(halves.saved) + len(halves.read_again)
    assert all(node.users for node in inputs)
