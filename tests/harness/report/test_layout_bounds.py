"""What reports tell of two layouts."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema

from bitproof.harness.records import InFloat64, LayoutBounds, LayoutRow
from bitproof.harness.report import json as report_json
from bitproof.harness.report import markdown, schema

ROW = LayoutRow(step=1, kind="grad", name="w", error=1e-7, bound=4e-7)
FOUND = LayoutBounds(
    across=6,
    exact=1,
    regrouped=11,
    regrouped_from="backward",
    samples=3,
    confidence=0.99,
    rows=[ROW, LayoutRow(step=0, kind="loss", name="loss", error=None, bound=None)],
)


def test_layouts_go_through_report_json_and_fit_the_schema(make_report, make_result):
    text = report_json.render(make_report(make_result("laid", layouts=FOUND), make_result("whole")))
    jsonschema.Draft202012Validator(json.loads(schema.schema_text())).validate(json.loads(text))
    assert [result.layouts for result in report_json.parse(text).cases] == [FOUND, None]


def test_the_report_for_people_has_each_tensors_bound_and_what_it_used_of_it(make_report, make_result):
    text = markdown.render(make_report(make_result("laid", layouts=FOUND), make_result("whole")))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["1", "grad", "w", "1e-07", "4e-07", "25%"] in lines
    assert ["0", "loss", "loss", "infinite", "must be equal", ""] in lines
    assert text.count("### LayoutBounds") == 1
    assert (
        "6 tensors have another layout; 1 had to be equal, 11 may be regrouped, from backward on; 0 are beyond what 3 "
        "runs with sums in other orders explain at 99%, and the largest used share of a bound is 25%" in text
    )


def test_the_sentence_says_what_the_second_test_found():
    assert (
        replace(FOUND, in_float64=InFloat64(beyond=3))
        .describe()
        .endswith("; in float64, 3 differ by more than rounding")
    )
    assert replace(FOUND, in_float64=InFloat64(failed="it raised")).describe() == FOUND.describe()


def test_close_of_two_layouts_needs_bounds_that_hold(make_result):
    from bitproof.harness.case import Parallelism
    from bitproof.harness.consistency import contradiction

    close = make_result("laid", "CLOSE", expected="CLOSE")
    case = replace(close.case, close_within=None, reference_parallelism=Parallelism())
    within = replace(FOUND, rows=[ROW])
    good = replace(close, case=case, closeness=None, layouts=within)
    assert contradiction(good) is None
    assert contradiction(replace(good, layouts=None)) is not None
    assert contradiction(replace(good, layouts=FOUND)) is not None
    assert contradiction(replace(good, layouts=replace(within, beyond=1))) is not None
    assert contradiction(replace(good, layouts=replace(within, samples=0))) is not None
    assert contradiction(replace(good, layouts=replace(within, rows=[]))) is not None
    stays = InFloat64(beyond=1, rows=[ROW])
    assert contradiction(replace(good, layouts=replace(within, in_float64=InFloat64()))) is None
    assert contradiction(replace(good, layouts=replace(within, in_float64=stays))) is not None
    assert contradiction(replace(good, layouts=replace(within, rows=[replace(ROW, apart=True)]))) is not None
    assert contradiction(replace(good, layouts=replace(within, rows=[replace(ROW, rank=99)]))) is not None
