"""Give expert all-to-alls their own process group.

Needs:    every collective names a group of `context.groups`.
Promises: same nodes, same order, same bits; only the groups of all-to-alls change.
Refuses:  a process-group object reported with two rank sets.

The collectives of a process-group object run in sequence, so an all-to-all would wait for the parameters'
gathers and reductions, and could not overlap with compute.

1. Sort the graph's collectives by process-group object.
2. Check that each object has a single rank set. Objects with equal ranks stay separate.
3. If an object has all-to-alls and other collectives, move all its all-to-alls, forward and backward, to a new
   high-priority group over the same ranks in the same order. Only calls of ALL_TO_ALL count as all-to-alls.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.group_objects import collectives_by_object, move_to_own_group
from bitproof.harness.graph.groups import EXPERT_ONLY

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
"""The only collective that is moved. Experts use no other operator of that name.

The operator in `_c10d_functional_autograd` is excluded, since its backward is no node of the graph.
"""


def isolate_process_groups(module: GraphModule, context: PassContext) -> GraphModule:
    for collectives in collectives_by_object(module.graph, context.groups):
        exchanges = [node for node in collectives if node.target is ALL_TO_ALL]
        # All-to-alls that have an object to themselves need no other group.
        if exchanges and len(exchanges) < len(collectives):
            name = move_to_own_group(exchanges, context.groups, EXPERT_ONLY, high_priority=True)
            context.facts[name] = len(exchanges)
    if context.facts:
        module.recompile()
    return module
