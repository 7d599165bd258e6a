"""The cause of each case that is not as expected stands at the top of a page, before any table of details."""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.records import Finding
from bitproof.harness.report import causes
from bitproof.harness.report.html import document
from bitproof.harness.report.markdown import render as markdown


def test_a_differing_case_has_its_tensor_and_its_call(localized):
    found = dict(causes.lines_of(localized))
    assert found["first difference"].startswith(f"step {localized.first_divergence.step}, rank ")
    assert localized.first_divergence.call.operator in found["to blame"]


def test_a_difference_without_a_call_says_so(localized):
    first = replace(localized.first_divergence, call=None, holds=None)
    assert dict(causes.lines_of(replace(localized, first_divergence=first)))["to blame"] == "no call was found"


def test_an_error_is_its_first_line_and_a_check_its_reason(make_result):
    assert causes.lines_of(make_result("broken", "ERROR", error="rank 3 died\nTraceback")) == [("error", "rank 3 died")]
    objected = make_result("equal", "EQUAL", checks={"own": Finding(objection="too much memory")})
    assert causes.lines_of(objected) == [("check own", "too much memory")]


def test_a_long_text_is_cut(make_result):
    [(_, found)] = causes.lines_of(make_result("broken", "ERROR", error="x" * 10_000))
    assert len(found) < causes.MAX_CHARS + 100 and "report.json has the rest" in found


def test_a_case_as_expected_is_not_explained(make_report, make_result):
    report = make_report(make_result("good", "EQUAL"))
    assert causes.explained(report) == ([], 0)
    assert 'class="cause"' not in document.render(report)


def test_both_pages_have_the_cause_before_the_details(make_report, localized):
    report = make_report(localized)
    for page, details in ((markdown(report), "<details>"), (document.render(report), "<details")):
        top = page.partition("<body")[2] or page
        assert "to blame" in top.partition(details)[0]


def test_many_cases_are_counted(make_report, make_result):
    names = [f"case{index}" for index in range(causes.MAX_CASES + 3)]
    report = make_report(*[make_result(name, "ERROR", error="rank 3 died") for name in names])
    assert causes.explained(report)[1] == 3
    assert "3 more cases are not as expected" in markdown(report)
    assert "3 more cases are not as expected" in document.render(report)
