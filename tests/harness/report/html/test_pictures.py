"""Ranks as lanes around a blamed call."""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.records import BlamedCall, ChainLink
from bitproof.harness.report.html.pictures import MAX_LANES, lanes_of

CHAIN = [
    ChainLink(operator="mm", module="blocks.1.down", rank=2),
    ChainLink(operator="all_reduce", rank=2),
    ChainLink(operator="all_reduce", rank=0),
]
CALL = BlamedCall(operator="mm", rank=2, ranks="1, 2", chain=CHAIN)


def test_a_chain_is_a_line_through_the_lanes_of_its_ranks():
    found = lanes_of(CALL, 4)
    assert found is not None
    heights = dict(found.lanes)
    assert list(heights) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [(y, operator, module) for _, y, operator, module in found.calls] == [
        (heights["rank 2"], "mm", "1.down"),
        (heights["rank 2"], "all_reduce", ""),
        (heights["rank 0"], "all_reduce", ""),
    ]
    assert found.points == " ".join(f"{x},{y}" for x, y, _, _ in found.calls)
    assert found.alike == [(found.calls[0][0], heights["rank 1"])]


def test_of_many_ranks_those_of_the_chain_have_lanes():
    found = lanes_of(replace(CALL, chain=[replace(CHAIN[0], rank=900), *CHAIN[1:]], ranks="900"), 1000)
    assert found is not None and len(found.lanes) == MAX_LANES and found.left_out == 1000 - MAX_LANES
    assert {"rank 0", "rank 2", "rank 900"} <= {name for name, _ in found.lanes}


def test_without_a_chain_there_is_no_picture():
    assert lanes_of(None, 2) is None and lanes_of(replace(CALL, chain=None), 2) is None
