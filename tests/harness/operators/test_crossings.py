"""The order in which ranks launch messages and collectives of one group, each waited for in the end or by nobody.

Rank by rank: S sends to a rank, R receives from one, C is a collective of all ranks, B a batch of messages that run
together, with the ranks sent to and those received from; a letter behind a colon is another group than 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from bitproof.harness.operators.crossings import QueueEntry, find_deadlocks
from tests.harness.graph.hazards.test_messages import between


def graphs(text: str) -> list[list[tuple[Any, ...]]]:
    """The ranks' orders, `S1 C | C R0`, as `between` takes them."""

    def one(word: str) -> tuple[Any, ...]:
        call, _, group = word.partition(":")
        kind, rest = call[0], call[1:]
        if kind == "B":
            to, _, of = rest.partition("<")
            return "batch later", [*map(int, to)], [*map(int, of)], group or "0"
        name = {"S": "isend", "R": "irecv", "C": "reduce"}[kind]
        return f"{name} later", int(rest or 0), 0, group or "0"

    return [[one(word) for word in rank.split()] for rank in text.split("|")]


CROSSED = {
    "a sum before the message on one rank": ("S1 C | C R0", "rank 0 is in `isend", "`irecv_default` (", "`all_reduce"),
    "a sum before the message on the sender": ("C S1 | R0 C", "rank 0 is in `all_reduce", "`all_reduce", "`irecv"),
    "both send first": ("S1 R1 | S0 R0", "rank 0 is in `isend_default`", "`irecv_default` (", "behind `isend"),
    "both receive first": ("R1 S1 | R0 S0", "rank 0 is in `irecv_default`", "`isend_default` (", "behind `irecv"),
    "a ring of three": ("S1 R2 | S2 R0 | S0 R1", "rank 0 is in `isend", "rank 1 launches as `irecv", "behind `isend"),
    "a sum between two messages": ("S1 C S1 | R0 R0 C", "rank 0 is in `all_reduce", "`all_reduce", "`irecv_default_1`"),
    "the rank between is late": ("S1 C | R2 R0 C | C S1", "rank 2 is in `all_reduce", "`all_reduce", "`isend"),
    "a batch and a sum": ("B1<1 C | C B0<0", "rank 0 is in `batch_p2p_ops_default`", "`batch", "behind `all_reduce"),
    "messages in two batches": ("B1< B<1 | B0< B<0", "rank 0 is in `batch", "launches as `batch", "behind `batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", CROSSED)
def test_launches_of_one_group_in_two_orders_are_named_with_both_calls(name: str) -> None:
    text, *reported = CROSSED[name]
    lines = between(*graphs(text))
    assert any(all(part in line for part in reported) for line in lines), lines
    assert all("ranks may wait for each other for ever" in line for line in lines)


RIGHT = {
    "the message before the sum on both": "S1 C | R0 C",
    "one sends first, the other receives first": "S1 R1 | R0 S0",
    "a ring of three whose last receives first": "S1 R2 | S2 R0 | R1 S0",
    "both send in a batch": "B1<1 | B0<0",
    "a ring of three in batches": "B1<2 | B2<0 | B0<1",
    "a batch against single messages": "B1<1 C | S0 R0 C",
    "the message in a group of its own": "S1:p C | C R0:p",
    "each direction in a group of its own": "S1:up R1:down | S0:down R0:up",
    "messages that share no rank": "S1 C | R0 C | C S3 | C R2",
}


@pytest.mark.parametrize("name", RIGHT)
def test_launches_of_one_group_in_an_order_that_all_ranks_share_are_right(name: str) -> None:
    assert between(*graphs(RIGHT[name])) == []


def test_launches_that_nobody_waits_for_are_held_up_too() -> None:
    def turns(rank: int, *groups: str) -> list[QueueEntry]:
        return [QueueEntry("sum", "g", (0, 1), "`sum`") if x == "g" else message(rank) for x in groups]

    def message(rank: int) -> QueueEntry:
        return QueueEntry("message", "g, from rank 0 to rank 1", (0, 1), f"`m{rank}`", communicator="g")

    assert find_deadlocks({0: turns(0, "m", "g"), 1: turns(1, "m", "g")}) == []
    first, second = map(str, find_deadlocks({0: turns(0, "m", "g"), 1: turns(1, "g", "m")}))
    why = "ranks may wait for each other for ever: rank 0 is in `m0`, which rank 1 launches as `m1` behind `sum`; "
    assert first == f"{why}on NCCL group g runs its launches one after the other"
    assert "rank 1 is in `sum`, which rank 0 launches as `sum` behind `m0`" in second
