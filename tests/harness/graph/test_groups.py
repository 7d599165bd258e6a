from __future__ import annotations

import pytest

from bitproof.harness.errors import PassError
from bitproof.harness.graph.groups import Group, GroupTable

PAIRS = ((0, 1), (2, 3))


def test_a_derived_group_joins_the_same_ranks_under_a_name_of_its_own() -> None:
    table = GroupTable({"ep": Group("first", PAIRS)})
    name = table.derive("ep", "expert_only", high_priority=True)
    assert name == "ep.expert_only"
    assert table[name] == Group(name, PAIRS, high_priority=True)


def test_ranks_make_each_derived_group_once_in_the_order_of_asking() -> None:
    table = GroupTable({"ep": Group("first", PAIRS), "dp": Group("second", ((0, 1, 2, 3),))})
    for source in ("ep", "dp", "ep"):
        table.derive(source, "reduce")
    assert list(table.made()) == ["ep.reduce", "dp.reduce"]
    assert table.partitions()["ep.reduce"] == table["ep"].partition


def test_a_name_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(PassError) as error:
        GroupTable({"ep": Group("first", PAIRS)})["tp"]
    assert "the graph names an unknown process group: tp\n  expected: one of ep\n" in str(error.value)
