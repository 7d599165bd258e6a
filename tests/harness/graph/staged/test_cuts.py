from __future__ import annotations

from bitproof.harness.graph.staged.cuts import STAGE_KEY, Cuts
from tests.harness.graph.graphs import Layers, trace
from tests.harness.graph.staged.stages import layer


def test_a_call_lies_in_its_layers_stage_but_one_that_states_its_own_lies_there():
    joint = trace(Layers(layer(), layer(), layer()))
    cuts = Cuts(num_stages=2, num_layers=3)
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    stages = {node.meta["origin"].module: cuts.stage_of(node) for node in calls}
    assert stages | {None: None, "": None} == {"layers.0": 0, "layers.1": 0, "layers.2": 1, None: None, "": None}
    call = next(node for node in calls if node.meta["origin"].module == "layers.0")
    call.meta[STAGE_KEY] = 1
    assert cuts.stage_of(call) == 1
