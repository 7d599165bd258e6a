"""Collectives that name one process-group object, by whatever name, wait for one another."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from bitproof.harness.errors import PassError
from bitproof.harness.graph.group_objects import collectives_by_object, move_to_own_group
from bitproof.harness.graph.groups import Group, GroupTable
from tests.harness.graph.graphs import Sketch

c10d = torch.ops._c10d_functional
BOTH = ((0, 1),)


def reducing(*names: str) -> Graph:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    for name in names:
        x = sketch.call(c10d.wait_tensor.default, sketch.call(c10d.all_reduce.default, x, "sum", name))
    return sketch.finish(x).graph


def test_two_names_of_one_object_are_sorted_together_and_another_apart() -> None:
    table = GroupTable({"ep": Group("ep", BOTH), "tp": Group("ep", BOTH), "fsdp": Group("fsdp", BOTH)})
    found = collectives_by_object(reducing("ep", "fsdp", "tp"), table)
    assert [[str(node.args[-1]) for node in nodes] for nodes in found] == [["ep", "tp"], ["fsdp"]]


def test_collectives_move_to_one_new_group_over_the_same_ranks() -> None:
    table = GroupTable({"ep": Group("ep", BOTH), "tp": Group("ep", BOTH)})
    [nodes] = collectives_by_object(reducing("ep", "tp"), table)
    assert move_to_own_group(nodes, table, "own", high_priority=True) == "ep.own"
    assert {node.args[-1] for node in nodes} == {"ep.own"}
    assert table.made() == {"ep.own": Group("ep.own", BOTH, high_priority=True)}


def test_one_object_with_two_rank_sets_is_refused() -> None:
    table = GroupTable({"ep": Group("ep", ((0, 1), (2, 3))), "tp": Group("ep", ((0, 2), (1, 3)))})
    with pytest.raises(PassError, match="`all_reduce` and `all_reduce_1` share an object"):
        collectives_by_object(reducing("ep", "tp"), table)
