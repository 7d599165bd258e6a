"""Give the all-gathers of parameters their own process group.

Needs:    parameters are the graph's first inputs; their gradients are its outputs after the loss, in the same
          order; every collective names a group of `context.groups`.
Promises: same nodes, same order, same bits; only the groups of parameters' all-gathers change.
Refuses:  a process-group object reported with two rank sets.

The collectives of a process-group object run in sequence. If a gather shared the object with other collectives, the
gather for the next block would wait for the reductions of gradients, for example.

1. Sort the graph's collectives by process-group object.
2. Find the all-gathers whose input is a parameter, after casts, changes of shape and padding at most.
3. If an object has such gathers and other collectives, move the gathers to a new group over the same ranks.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from bitproof.harness.graph.analysis.parameters import chain_to_input, parameters_of
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.group_objects import collectives_by_object, move_to_own_group
from bitproof.harness.graph.groups import GATHERS

ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def isolate_gathers(module: GraphModule, context: PassContext) -> GraphModule:
    parameters = parameters_of(module.graph)
    for collectives in collectives_by_object(module.graph, context.groups):
        gathers = [node for node in collectives if node.target is ALL_GATHER and chain_to_input(node)[-1] in parameters]
        # Gathers that have an object to themselves need no other group.
        if gathers and len(gathers) < len(collectives):
            context.facts[move_to_own_group(gathers, context.groups, GATHERS)] = len(gathers)
    if context.facts:
        module.recompile()
    return module
