from __future__ import annotations

import torch

from bitproof.harness.graph.staged.cuts import Cuts
from tests.harness.graph.graphs import Layers, trace
from tests.harness.graph.staged.stages import layer


def test_a_call_lies_in_its_layers_stage_and_a_value_crosses_where_another_stages_layer_reads_it():
    joint = trace(Layers(layer(), layer(), layer()))
    cuts = Cuts(num_stages=2, num_layers=3)
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    stages = {node.meta["origin"].module: cuts.stage_of(node) for node in calls}
    assert stages | {None: None, "": None} == {"layers.0": 0, "layers.1": 0, "layers.2": 1, None: None, "": None}
    forward = [node for node in calls if node.meta["origin"].direction == "forward"]
    crossing = [node for node in forward if cuts.crosses(node) and isinstance(node.meta["val"], torch.Tensor)]
    assert crossing and {node.meta["origin"].module for node in crossing} == {"layers.1"}
    assert not any(Cuts().crosses(node) for node in calls)
