"""Sensitivity, beside the verdict and in tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.harness.powers.sensitivity import report as sensitivity
from bitproof.harness.powers.sensitivity.records import (
    FormulaRow,
    Sensitivity,
    SensitivityRow,
    UnseenCall,
    by_direction,
    wilson,
)
from bitproof.harness.records import Report
from bitproof.harness.report import json, text
from bitproof.harness.report.html.document import render as html
from bitproof.harness.report.markdown import render as markdown
from tests.harness.reports import case
from tests.harness.reports import result as result_of


def result():
    return result_of(case())


def report(cases):
    return Report(run_id="one", exit_status=0, environment={}, cases=cases)


MOE = SensitivityRow(module="layers.*.moe", direction="forward", calls=2000, tried=2000, seen=1955, at_once=1900)
NORM = SensitivityRow(module="norm", direction="backward", calls=840, tried=840, seen=810, at_once=700, blind=14)
LOST = UnseenCall(operator="mul", module="norm", direction="backward", reason="rounded away in add")
BLIND = replace(LOST, operator="neg", is_blind=True, reason="multiplied by zero in mul")
FORMULA = FormulaRow(operator="rsqrt", formula="1 / sqrt(x)", tried=9, seen=5, same=3, lost=1)
FOUND = Sensitivity(
    steps=2, ranks=8, rows=[MOE, NORM], unseen=[LOST, LOST, BLIND], formulas=[FORMULA], seconds=61.2, processes=2
)
SAMPLED = replace(FOUND, rows=[replace(MOE, tried=100, seen=90, at_once=80)])


def test_a_clause_gives_the_share_of_calls_that_are_not_blind():
    assert sensitivity.clause(FOUND) == "sees 97.8% of 2,826 calls"
    assert sensitivity.clause(Sensitivity(reason="no")) == ""


def test_all_but_one_is_not_all():
    assert sensitivity.percent(1.0) == "100.0%" and sensitivity.percent(0.99999) == "99.9%"


def test_a_sample_gives_its_interval():
    assert sensitivity.clause(SAMPLED) == "sees 90.0% (82.6-94.5%) of 2,000 calls"
    assert not FOUND.is_sampled and FOUND.interval is None
    assert wilson(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)  # as R's prop.test(90, 100, correct = FALSE)
    assert wilson(0, 10)[0] == 0.0 and wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_a_headline_says_under_which_effort():
    assert sensitivity.headline(FOUND) == (
        "sees 97.8% of 2,826 calls (2,600 at once, by the first element in the "
        "first step; 14 more are blind by nature), 8 ranks, 2 steps; 61 s"
    )
    assert ", by a sample of 100 (80 at once" in sensitivity.headline(SAMPLED)
    missing = Sensitivity(reason="system toy is not known as a graph")
    assert sensitivity.headline(missing).endswith("sensitivity not measured: system toy is not known as a graph")


def test_directions_are_summed_over_modules():
    both = by_direction([MOE, replace(NORM, direction="forward")])
    assert [(row.direction, row.calls, row.seen, row.blind) for row in both] == [("forward", 2840, 2765, 14)]


def test_tables_show_what_became_of_what_nobody_saw():
    found = {title: rows for title, _, rows in sensitivity.tables(FOUND)}
    assert found["calls not seen"] == [("backward", "mul", "2", "rounded away in add")]
    assert found["calls blind by nature"] == [("backward", "neg", "1", "multiplied by zero in mul")]
    assert found["neighbouring formulas"] == [("rsqrt", "1 / sqrt(x)", "9", "5", "3", "1")]
    assert found["calls seen, by module and direction"][-1][-1] == "98.1%", "810 of 826"
    untried = replace(FOUND, rows=[MOE, replace(NORM, tried=0, seen=0, at_once=0, blind=0)])
    [_, _, body] = next(sensitivity.tables(untried))
    assert [row[:2] for row in body] == [("all", "forward"), ("layers.*.moe", "forward")]


def test_every_form_of_the_report_has_it_beside_the_verdict():
    shown = report([replace(result(), checks={"sensitivity": sensitivity.finding_of(FOUND)})])
    clause = f"{shown.cases[0].verdict}, sees 97.8% of 2,826 calls"
    assert text.outcome(shown.cases[0]) == clause
    assert clause in markdown(shown) and "rounded away in add" in markdown(shown)
    assert ", sees 97.8% of 2,826 calls" in html(shown) and "rounded away in add" in html(shown)
    assert sensitivity.measured(json.parse(json.render(shown)).cases[0]) == FOUND
    plain = report([result()])
    assert "sees" not in text.outcome(plain.cases[0]) and json.parse(json.render(plain)).cases[0].checks == {}
