"""Ranks as lanes around a blamed call, and the map of modules."""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.records import BlamedCall, ChainLink, ModuleCalls
from bitproof.harness.report.html.pictures import MAX_LANES, MAX_MODULES, lanes_of, module_map

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


def calls(module, direction, turn=None):
    return ModuleCalls(module=module, direction=direction, calls=9, differing=2 if turn else 0, turn=turn)


def test_a_cell_is_the_darker_the_earlier_its_module_first_differs():
    modules = [calls("a", "forward"), calls("b", "forward", 1), calls("b", "backward", 2), calls("a", "backward", 9)]
    found = module_map(replace(CALL, modules=[*modules, calls(None, "update", 10)]))
    assert found is not None and found.directions == ["forward", "backward", "update"]
    shades = {name: [(text, shade) for text, shade, _ in row] for name, row in found.rows}
    assert shades == {
        "a": [("agrees", "0"), ("2 of 9", "1"), ("", "")],
        "b": [("2 of 9", "4"), ("2 of 9", "4"), ("", "")],
        "no module": [("", ""), ("", ""), ("2 of 9", "1")],
    }


def test_of_many_modules_those_that_differ_are_shown():
    modules = [calls(f"m{i}", "forward") for i in range(100)] + [calls("last", "forward", 1)]
    found = module_map(replace(CALL, modules=modules))
    assert found is not None and len(found.rows) == MAX_MODULES and found.left_out == 101 - MAX_MODULES
    assert found.rows[-1][0] == "last"


def test_without_counts_there_is_no_map():
    assert module_map(None) is None and module_map(CALL) is None
