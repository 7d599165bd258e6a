from __future__ import annotations

import pytest

from bitproof.builtin_cases import all_cases
from bitproof.harness.case import Parallelism
from bitproof.harness.commands.shard import cases_of, parse_shard
from bitproof.harness.errors import UsageError
from tests.harness.reports import case


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_every_case_is_in_exactly_one_shard_in_the_order_of_the_selection(count):
    selection = list(all_cases())
    parts = [cases_of(parse_shard(f"{index}/{count}", selection)) for index in range(1, count + 1)]
    names = [entry.name for part in parts for entry in part]
    assert sorted(names) == sorted(entry.name for entry in selection)
    for part in parts:
        assert part == [entry for entry in selection if entry in part]


def test_shards_have_about_the_same_to_do():
    parts = [cases_of(parse_shard(f"{index}/4", all_cases())) for index in range(1, 5)]
    loads = [sum(entry.parallelism.world_size * (entry.steps + 7) for entry in part) for part in parts]
    assert max(loads) < 1.1 * min(loads)


def test_the_costliest_case_goes_to_the_shard_with_the_least_to_do():
    long, wide = case("long", steps=40), case("wide", steps=20, parallelism=Parallelism(world_size=4))
    selection = [case("a", steps=20), long, case("b", steps=20), wide]
    first, second = (cases_of(parse_shard(f"{index}/2", selection)) for index in (1, 2))
    assert [entry.name for entry in first] == ["b", "wide"]
    assert [entry.name for entry in second] == ["a", "long"]


def test_more_shards_than_cases_leave_some_empty():
    assert [len(cases_of(parse_shard(f"{index}/3", [case("a"), case("b")]))) for index in (1, 2, 3)] == [1, 1, 0]


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "-1/2", "1/2/3", "a/b", "1/02", " 1/2", "1/2\n", "1/9999999"])
def test_what_is_no_part_of_a_whole_is_refused(text):
    with pytest.raises(UsageError) as error:
        parse_shard(text, [case()])
    assert error.value.what.startswith("--shard ") and error.value.found == repr(text)
