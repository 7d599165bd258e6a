"""A step divided by a minimum cut: its text, its bits, the bytes that live across, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitproof.harness.errors import PassError
from bitproof.harness.graph.analysis.halves import HALF_KEY
from bitproof.harness.graph.origin import RECOMPUTED_KEY
from bitproof.harness.graph.passes.partition import partition
from tests.harness.graph.graphs import (
    Applied,
    Layers,
    batch,
    context_of,
    differing,
    listing,
    parameter,
    run_eager,
    run_graph,
    trace,
    verify,
)
from tests.harness.graph.joint_graphs import Counting, export, partitioned

WAYS = ("min_cut", "default")


def halves_of(module: Any) -> list[str]:
    return [node.meta[HALF_KEY] for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("by", WAYS)
def test_forward_stands_before_backward_and_the_bits_are_eagers(by: str) -> None:
    model = Layers(Counting(), Counting())
    found = partitioned(model, by)
    verify(found.module)
    halves = halves_of(found.module)
    assert halves == sorted(halves, reverse=True) and set(halves) == {"forward", "backward"}
    assert differing(run_eager(model, batch()), run_graph(found.module, found.joint, model, batch())) == []


def test_the_minimum_cut_saves_fewer_bytes_than_what_forward_computed() -> None:
    cut, default = (partitioned(Layers(Counting(), Counting()), by).facts for by in WAYS)
    assert 0 < cut["saved_bytes"] < default["saved_bytes"] <= default["uncut_bytes"] == cut["uncut_bytes"]
    assert cut["recomputed"] > 0 == default["recomputed"]
    assert cut["nodes_forward"] < cut["nodes_joint"] > cut["nodes_backward"]


def test_what_backward_computes_again_is_a_forward_call_marked_so() -> None:
    found = partitioned(Layers(Counting()))
    again = [node for node in found.module.graph.nodes if node.meta.get(RECOMPUTED_KEY)]
    assert len(again) == found.facts["recomputed"] > 0
    assert {(node.meta[HALF_KEY], node.meta["origin"].direction) for node in again} == {("backward", "forward")}
    assert all(node.name.endswith("_recomputed") for node in again)


def reads_what_it_writes(self: Applied, x: Tensor) -> Tensor:
    y = x * self.w * self.count.clone()
    self.count.add_(1)
    return y


def test_a_buffer_that_backward_reads_as_it_was_is_written_after_it() -> None:
    model = Layers(Applied(reads_what_it_writes, w=parameter(8), count=torch.full((), 3.0)))
    found = partitioned(model)
    write = list(found.module.graph.nodes)[-2]
    assert (write.target, write.meta[HALF_KEY]) == (torch.ops.aten.copy_.default, "backward")
    assert differing(run_eager(model, batch()), run_graph(found.module, found.joint, model, batch())) == []


def test_a_buffer_that_backward_does_not_read_is_written_with_forward() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = parameter(8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.w

    model = Layers(Counted())
    found = partitioned(model)
    [write] = [node for node in found.module.graph.nodes if node.target is torch.ops.aten.copy_.default]
    assert write.meta[HALF_KEY] == "forward"
    assert differing(run_eager(model, batch()), run_graph(found.module, found.joint, model, batch())) == []


def adds_the_old_value(self: Applied, x: Tensor) -> Tensor:
    old = self.count.view(-1).clone()
    self.count.add_(1)
    return (x * self.w).relu() + old


def test_a_buffer_is_written_after_the_last_call_that_reads_its_old_value() -> None:
    model = Layers(Applied(adds_the_old_value, w=parameter(8), count=torch.full((), 3.0)))
    joint = export(model)
    # As values, the old and the new one may be computed in any order.
    by_target = {node.target: node for node in reversed(joint.module.graph.nodes)}
    view, clone = by_target[torch.ops.aten.view.default], by_target[torch.ops.aten.clone.default]
    relu = by_target[torch.ops.aten.relu.default]
    relu.append(clone)
    relu.append(view)
    module = partition(joint.module, context_of(joint), by="default")
    nodes = [node.target for node in module.graph.nodes]
    assert nodes.index(torch.ops.aten.copy_.default) == nodes.index(torch.ops.aten.clone.default) + 1
    assert differing(run_eager(model, batch()), run_graph(module, joint, model, batch())) == []


def noisy(self: Applied, x: Tensor) -> Tensor:
    y = x * self.w
    return y * torch.randn_like(x) + y.sin() * torch.randn_like(x)


@pytest.mark.parametrize("by", WAYS)
def test_two_equal_draws_of_random_numbers_stay_two(by: str) -> None:
    model = Layers(Applied(noisy, w=parameter(8)))
    found = partitioned(model, by)
    torch.manual_seed(3)
    eager = run_eager(model, batch())
    torch.manual_seed(3)
    assert differing(eager, run_graph(found.module, found.joint, model, batch())) == []


def test_a_step_that_our_own_tracer_recorded_has_no_start_of_backward_to_cut_at() -> None:
    joint = trace(Layers(Applied(lambda self, x: x * self.w, w=parameter(8))))
    before = listing(joint.module)
    with pytest.raises(PassError) as error:
        partition(joint.module, context_of(joint), by="min_cut")
    assert str(error.value) == (
        "PassError: a graph without a start of backward cannot be partitioned\n"
        "  expected: one call that makes backward's initial gradient, as in an exported step\n"
        "  found: 0 of them"
    )
    assert listing(joint.module) == before


def test_a_graph_that_writes_in_place_is_refused_by_the_call() -> None:
    joint = export(Layers(Applied(lambda self, x: x * self.w, w=parameter(8))))
    [first, *_] = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    with joint.module.graph.inserting_after(first):
        written = joint.module.graph.call_function(torch.ops.aten.add_.Tensor, (first, 1))
    written.meta = dict(first.meta)
    with pytest.raises(PassError) as error:
        partition(joint.module, context_of(joint), by="min_cut")
    assert str(error.value) == (
        "PassError: a graph that writes in place cannot be partitioned: `add__tensor` does\n"
        "  expected: values, and copies of them into buffers that are not read afterwards\n"
        "  found: aten.add_.Tensor of mul"
    )
