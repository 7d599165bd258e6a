"""Finds collectives that share a process-group object, and so run in sequence."""

from __future__ import annotations

from torch.fx import Graph, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph import operators
from bitproof.harness.graph.groups import GroupTable, Partition


def collectives_by_object(graph: Graph, groups: GroupTable) -> list[list[Node]]:
    """Return a list of collectives for each process-group object, in the graph's order.

    Raises PassError for a group that is not in the table, and for an object with two sets of ranks.
    """
    by_object: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if operators.is_collective(node):
            by_object.setdefault(groups[operators.group_name(node)].object, []).append(node)
    for collectives in by_object.values():
        _check_rank_sets(collectives, groups)
    return list(by_object.values())


def move_to_own_group(nodes: list[Node], groups: GroupTable, purpose: str, *, high_priority: bool = False) -> str:
    """Move collectives to a new group over the same ranks, and return its name, which ends with `purpose`.

    The collectives must share a process-group object.
    """
    name = groups.derive(operators.group_name(nodes[0]), purpose, high_priority=high_priority)
    for node in nodes:
        # A functional collective has the group's name as its last argument.
        node.args = (*node.args[:-1], name)
    return name


def _check_rank_sets(collectives: list[Node], groups: GroupTable) -> None:
    users: dict[Partition, Node] = {}
    for node in collectives:
        users.setdefault(groups[operators.group_name(node)].partition, node)
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
