"""Which call lies in which stage, and what cannot lie in any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitproof.harness.case import Schedule
from bitproof.harness.errors import PassError
from bitproof.harness.graph.staged import placed_calls
from bitproof.harness.graph.staged.cut_graph import cut
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.harness.graph.staged.placed_calls import PlacedCalls
from bitproof.harness.graph.staged.stage_graphs import StageGraphs
from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    batch,
    chunked,
    differing,
    parameter,
    run_eager,
    run_graph,
    trace,
)
from tests.harness.graph.staged.stages import layer, parts_of, run


def test_each_call_lies_in_one_half_of_one_stage_and_what_crosses_is_sent_once():
    joint = trace(Layers(layer(), layer()))
    placed = PlacedCalls(joint.module, Cuts(2, 2), joint.chunk_symbol)
    places = [(stage, half) for stage in range(2) for half in ("forward", "backward")]
    own = {place: placed.own(*place) for place in places}
    assert sum(map(len, own.values())) == len(placed.stages) == len({x for calls in own.values() for x in calls})
    for stage, half in places:
        is_sent = (stage, half) in [(0, "forward"), (1, "backward")]
        assert len(placed.sent(own[stage, half])) == is_sent
        assert len(placed.received(stage, half, placed.given(own[stage, half]))) == (
            (stage, half) in [(1, "forward"), (0, "backward")]
        )


def test_a_value_that_passes_over_a_stage_is_refused_by_name():
    last = Applied(lambda module, x: x * module.weight + module.first, weight=parameter(D))
    model = Layers(layer(), layer(), last)

    def forward(x):
        last.first = model.layers[0](x)
        return last(model.layers[1](last.first))

    model.forward = forward
    with pytest.raises(PassError) as error:
        parts_of(model, 3)
    assert "stage 2 reads in forward what stage 0 computes in forward: `add" in str(error.value)
    parts_of(model, 2)


def test_what_crosses_has_a_size_that_is_known_before_the_step():
    class Picks(nn.Module):
        def forward(self, x):
            return x.flatten(0, 1)[x.flatten(0, 1).sum(1) > 0]

    with pytest.raises(PassError) as error:
        parts_of(Layers(Picks(), Applied(lambda module, x: x * module.weight, weight=parameter(D))), 2)
    assert "whose size is unknown before the step" in str(error.value)


def test_values_that_cross_have_a_tag_each(monkeypatch):
    monkeypatch.setattr(placed_calls, "MOST_CROSSINGS", 1)
    joint = trace(Layers(layer(), layer()))
    with pytest.raises(PassError, match="backward of stage 0 would receive more values than there are message tags"):
        cut(chunked(joint, "layers.*"), Cuts(2, 2), joint.chunk_symbol)


def scaled(shared):
    return Applied(lambda module, x: x * module.weight + x, weight=shared)


def test_a_parameter_of_two_stages_has_a_gradient_in_each_and_their_sum_is_in_neither():
    shared = parameter(D)
    model = Layers(scaled(shared), layer(), scaled(shared))
    joint, parts = parts_of(model, 3)
    [of_shared, *others] = parts.gradients
    assert list(of_shared) == [0, 2] and all(list(each) == [1] for each in others)
    joined = StageGraphs.of(joint.module, parts.cuts, joint.chunk_symbol).joined()
    x = batch()
    assert not differing(run_graph(joined, joint, model, x), run_graph(joint.module, joint, model, x))
    again = parts.of_other(joined)
    assert [list(each) for each in again.gradients] == [list(each) for each in parts.gradients]
    losses, [first, last, *_], _ = run(joint, again, model, Schedule(micro_batches=2, order="gpipe"), 3)
    whole = [run_eager(model, batch(seed=index)) for index in range(2)]
    assert torch.allclose(first + last, sum(step["grad layers.0.weight"] for step in whole)) and len(losses) == 2


def test_a_parameter_of_three_stages_is_refused_by_name():
    shared = parameter(D)
    with pytest.raises(PassError) as error:
        parts_of(Layers(*(scaled(shared) for _ in range(3))), 3)
    assert "stages 0, 1, 2 share the parameter `arg0_1`" in str(error.value)


def test_a_module_of_two_stages_is_refused_by_name():
    around = [Applied(lambda module, x: module.inner(x)) for _ in range(3)]
    around[0].inner = around[2].inner = layer()
    around[1].inner = layer()
    joint = trace(Layers(*around))
    with pytest.raises(PassError) as error:
        StageGraphs.of(joint.module, Cuts(3, 3), joint.chunk_symbol)
    assert "stages 0 and 2 share the module layers.0.inner" in str(error.value)
    StageGraphs.of(joint.module, Cuts(1, 3), joint.chunk_symbol)


def test_a_layer_of_two_stages_is_refused_by_what_it_reads():
    twice = layer()
    joint = trace(Layers(twice, layer(), twice))
    with pytest.raises(PassError, match="stage 0 reads in forward what stage 1 computes in forward: `add_1`"):
        StageGraphs.of(joint.module, Cuts(3, 3), joint.chunk_symbol)
