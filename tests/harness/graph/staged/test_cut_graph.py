"""A graph in stages."""

from __future__ import annotations

import torch

from bitproof.harness.graph.staged.cut_graph import cut
from bitproof.harness.graph.staged.cuts import Cuts
from tests.harness.graph.graphs import Layers, chunked, trace
from tests.harness.graph.staged.stages import layer, parts_of


def test_stages_send_activations_one_way_and_their_gradients_the_other_and_share_no_call():
    joint, parts = parts_of(Layers(layer(), layer(), layer()), 3)
    assert {place: len(part.sent) for place, part in parts.by_place.items()} == {
        **dict.fromkeys([(0, "forward"), (1, "forward"), (2, "backward"), (1, "backward")], 1),
        **dict.fromkeys([(2, "forward"), (0, "backward")], 0),
    }
    calls = [
        node.name
        for part in parts.by_place.values()
        for node in part.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    ]
    whole = joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert sorted(calls) == sorted(node.name for node in whole)
    again = parts.of_other(joint.module)
    assert [x.module.code for x in again.by_place.values()] == [x.module.code for x in parts.by_place.values()]


def test_a_graph_that_went_through_the_passes_is_cut_as_well():
    model = Layers(layer(), layer())
    joint = trace(model)
    module = chunked(joint, "layers.*")
    parts = cut(module, Cuts(2, 2), joint.chunk_symbol)
    assert [len(part.sent) for part in parts.by_place.values()] == [2, 0, 0, 2], "each chunk crosses by itself"
