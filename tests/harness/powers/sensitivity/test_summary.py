"""Findings summed up by module and direction, with what swallowed what nobody saw."""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.localize.logs.calls import CallSite
from bitproof.harness.powers.sensitivity.examine import CallFinding
from bitproof.harness.powers.sensitivity.summary import summed_up
from tests.harness.powers.sensitivity.toy import by_name, product, program_of


def placed():
    program = program_of(product)
    places = {
        "neg": CallSite("layers.0.moe", "forward", 1),
        "mul": CallSite("layers.1.moe", "backward"),
        "add": CallSite("", None),
    }
    program.calls = [
        replace(call, place=places.get(call.operator, CallSite(None, "backward"))) for call in program.calls
    ]
    return program


def test_calls_are_counted_by_the_pattern_of_their_module_and_their_direction():
    program = placed()
    neg, mul, add = (by_name(program, name).index for name in ("neg", "mul", "add"))
    found = {
        neg: CallFinding(call=neg, lost=(by_name(program, "mul_1").index,), is_blind=True),
        mul: CallFinding(call=mul, shown="loss", tries=2, neighbours={"other": "seen"}),
        add: CallFinding(call=add, lost=(-1,), tries=3, neighbours={"other": "lost"}),
    }
    reported = summed_up(program, found, {mul})
    assert reported.shown == {"loss": 1}
    rows = {
        (row.module, row.direction): (row.calls, row.tried, row.seen, row.at_once, row.blind) for row in reported.rows
    }
    assert rows == {
        ("layers.*.moe", "forward"): (1, 1, 0, 0, 1),
        ("layers.*.moe", "backward"): (2, 1, 1, 1, 0),
        ("the model itself", "forward"): (1, 1, 0, 0, 0),
        ("no module", "backward"): (3, 0, 0, 0, 0),
    }
    assert [(x.operator, x.module, x.chunk, x.is_blind, x.reason) for x in reported.unseen] == [
        ("neg", "layers.0.moe", 1, True, "multiplied by zero in mul"),
        ("add", "the model itself", None, False, "nothing reads it"),
    ]
    assert [(x.operator, x.formula, x.tried, x.seen, x.lost) for x in reported.formulas] == [
        ("mul", "other", 1, 1, 0),
        ("add", "other", 1, 0, 1),
    ]


def test_a_call_that_is_seen_in_one_step_is_not_blind_in_another():
    program = placed()
    neg = by_name(program, "neg").index
    reported = summed_up(program, {neg: CallFinding(call=neg, shown="grad", is_blind=True)}, set())
    assert [row.blind for row in reported.rows] == [0, 0, 0, 0] and reported.unseen == []
