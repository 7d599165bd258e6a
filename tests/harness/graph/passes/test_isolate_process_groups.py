"""All-to-alls that share a process group with other collectives get one of their own; all else stays as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from bitproof.harness.errors import PassError
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.groups import Group, GroupTable
from bitproof.harness.graph.passes.isolate_process_groups import isolate_process_groups
from tests.harness.graph.graphs import Sketch, listing

c10d = torch.ops._c10d_functional
BOTH = ((0, 1),)


def exchanging(*, backward: bool = True) -> tuple[GraphModule, PassContext]:
    """A gather over "fsdp", then an all-to-all over "ep" in forward and one in backward."""
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    gathered = sketch.call(c10d.wait_tensor.default, sketch.call(c10d.all_gather_into_tensor.default, x, 2, "fsdp"))
    there = sketch.call(c10d.all_to_all_single.default, gathered, [4, 4], [4, 4], "ep")
    back = sketch.call(c10d.all_to_all_single.default, there, [4, 4], [4, 4], "ep", backward=True)
    return sketch.finish(back), sketch.context()


def isolated(module: GraphModule, context: PassContext, **groups: Group) -> tuple[list[str], GroupTable]:
    """The collectives after the pass, and the table that it leaves."""
    context = replace(context, groups=GroupTable(dict(groups)))
    assert isolate_process_groups(module, context) is module
    return [line for line in listing(module) if "ep" in line or "fsdp" in line], context.groups


def test_all_to_alls_of_both_directions_leave_a_shared_object_for_one_new_group() -> None:
    lines, groups = isolated(*exchanging(), fsdp=Group("world", BOTH), ep=Group("world", BOTH))
    assert lines == [
        "all_gather_into_tensor = all_gather_into_tensor(x, 2, fsdp)",
        "all_to_all_single = all_to_all_single(wait_tensor, [4, 4], [4, 4], ep.expert_only)",
        "all_to_all_single_1 = all_to_all_single(all_to_all_single, [4, 4], [4, 4], ep.expert_only)",
    ]
    assert groups.made() == {"ep.expert_only": Group("ep.expert_only", BOTH, high_priority=True)}


def test_the_new_group_keeps_the_order_of_the_ranks() -> None:
    turned = ((1, 0),)
    _, groups = isolated(*exchanging(), fsdp=Group("world", turned), ep=Group("world", turned))
    assert groups["ep.expert_only"].partition == turned


def test_equal_ranks_of_distinct_objects_are_no_reason() -> None:
    module, context = exchanging()
    before = listing(module)
    _, groups = isolated(module, context, fsdp=Group("fsdp", BOTH), ep=Group("ep", BOTH))
    assert listing(module) == before
    assert groups.made() == {}
    assert context.facts == {}


def test_an_object_that_carries_nothing_but_all_to_alls_stays() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    first = sketch.call(c10d.all_to_all_single.default, x, [2, 2], [2, 2], "ep")
    second = sketch.call(c10d.all_to_all_single.default, first, [2, 2], [2, 2], "experts")
    module = sketch.finish(second)
    before = listing(module)
    _, groups = isolated(module, sketch.context(), ep=Group("ep", BOTH), experts=Group("ep", BOTH))
    assert listing(module) == before
    assert groups.made() == {}


def test_all_to_alls_under_two_names_of_one_object_move_to_one_group() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    first = sketch.call(c10d.all_to_all_single.default, x, [2, 2], [2, 2], "ep")
    second = sketch.call(c10d.all_to_all_single.default, first, [2, 2], [2, 2], "fsdp")
    reduced = sketch.call(c10d.all_reduce.default, second, "sum", "fsdp")
    lines, groups = isolated(sketch.finish(reduced), sketch.context(), fsdp=Group("fsdp", BOTH), ep=Group("fsdp", BOTH))
    assert [line.rsplit(" ")[-1] for line in lines[:3]] == ["ep.expert_only)", "ep.expert_only)", "fsdp)"]
    assert list(groups.made()) == ["ep.expert_only"]


def test_a_collective_of_like_name_is_not_taken_for_an_experts_all_to_all() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    alike = torch.ops._c10d_functional_autograd.all_to_all_single.default
    first = sketch.call(alike, x, [2, 2], [2, 2], "ep")
    second = sketch.call(c10d.all_to_all_single.default, first, [2, 2], [2, 2], "ep")
    lines, _ = isolated(sketch.finish(second), sketch.context(), ep=Group("ep", BOTH))
    assert [line.rsplit(" ")[-1] for line in lines[:2]] == ["ep)", "ep.expert_only)"]


def test_two_graphs_share_the_group_that_the_first_one_asked_for() -> None:
    table = GroupTable({"fsdp": Group("world", BOTH), "ep": Group("world", BOTH)})
    for _ in range(2):
        module, context = exchanging()
        isolate_process_groups(module, replace(context, groups=table))
        assert listing(module)[2].endswith("ep.expert_only)")
    assert table.derived == list(table.made()) == ["ep.expert_only"]


def test_the_report_says_how_many_all_to_alls_moved() -> None:
    module, context = exchanging()
    isolated(module, context, fsdp=Group("world", BOTH), ep=Group("world", BOTH))
    assert context.facts == {"ep.expert_only": 2}


def test_one_object_with_two_rank_sets_is_refused() -> None:
    with pytest.raises(PassError) as error:
        isolated(*exchanging(), fsdp=Group("world", ((0, 1), (2, 3))), ep=Group("world", ((0, 2), (1, 3))))
    assert str(error.value) == (
        "PassError: one process group is reported with two rank sets: "
        "`all_gather_into_tensor` and `all_to_all_single` share an object\n"
        "  expected: fsdp and ep over the same ranks\n"
        "  found: [0, 1] [2, 3] and [0, 2] [1, 3]\n"
        "  fix: give each rank set a process group of its own"
    )


def test_a_group_that_the_table_lacks_is_refused() -> None:
    with pytest.raises(PassError) as error:
        isolated(*exchanging(), fsdp=Group("fsdp", BOTH))
    assert str(error.value) == (
        "PassError: the graph names an unknown process group: ep\n"
        "  expected: one of fsdp\n"
        "  found: ep\n"
        "  fix: list the group in the context's table of groups"
    )


def test_refused_graphs_are_left_as_they_were() -> None:
    module, context = exchanging()
    before = listing(module)
    with pytest.raises(PassError):
        isolated(module, context, fsdp=Group("world", BOTH), ep=Group("world", ((1, 0),)))
    assert listing(module) == before
