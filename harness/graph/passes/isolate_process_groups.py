"""Give expert all-to-alls a process group of their own.

Needs:    every collective names a group of `context.groups`.
Promises: same nodes, same order, same bits; only the groups of all-to-alls change.
Refuses:  one process-group object reported with two rank sets.

The collectives of one process-group object run one after another, so an all-to-all would wait for the
parameters' gathers and reductions, and could not hide behind compute.

1. Sort the graph's collectives by process-group object.
2. Check that each object has one rank set. Equal ranks alone are no reason to do anything.
3. Where an object carries all-to-alls and anything else, hand all of its all-to-alls, forward and
   backward, to one new group over the same ranks in the same order, of high priority.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from harness.errors import PassError
from harness.graph import operators
from harness.graph.context import PassContext
from harness.graph.groups import EXPERT_ONLY, Partition


def isolate_process_groups(module: GraphModule, context: PassContext) -> GraphModule:
    """The pass: see the top of this file."""
    groups = context.groups
    by_object: dict[str, list[Node]] = {}
    for node in module.graph.nodes:
        if operators.is_collective(node):
            by_object.setdefault(groups[operators.group_name(node)].object, []).append(node)
    for collectives in by_object.values():
        _check_rank_sets(collectives, context)
    for collectives in by_object.values():
        exchanges = [node for node in collectives if operators.operator_name(node) == "all_to_all_single"]
        if not exchanges or len(exchanges) == len(collectives):
            continue
        name = groups.derive(operators.group_name(exchanges[0]), EXPERT_ONLY, high_priority=True)
        for node in exchanges:
            node.args = (*node.args[:-1], name)
        context.facts[name] = len(exchanges)
    if context.facts:
        module.recompile()
    return module


def _check_rank_sets(collectives: list[Node], context: PassContext) -> None:
    users: dict[Partition, Node] = {}
    for node in collectives:
        users.setdefault(context.groups[operators.group_name(node)].partition, node)
    if len(users) > 1:
        (ranks, first), (other_ranks, second), *_ = users.items()
        raise PassError(
            f"one process group is reported with two rank sets: `{first.name}` and `{second.name}` share an object",
            expected=f"{operators.group_name(first)} and {operators.group_name(second)} over the same ranks",
            found=f"{_text(ranks)} and {_text(other_ranks)}",
            fix="give each rank set a process group of its own",
        )


def _text(partition: Partition) -> str:
    return " ".join("[" + ", ".join(map(str, ranks)) + "]" for ranks in partition)
