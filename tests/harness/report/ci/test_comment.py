from __future__ import annotations

from dataclasses import replace

from bitproof.harness.report.ci import comment


def test_without_another_run_what_is_not_as_expected_has_a_row_with_its_cause(make_report, make_result, localized):
    page = comment.render(make_report(make_result("good"), localized))
    assert page.startswith("### bitproof: 1 of 2 cases not as expected\n")
    [row] = [line for line in page.splitlines() if line.startswith("| bad")]
    assert "expected EQUAL" in row and "**DIFFERENT (" in row and "moe.py:68" in row
    assert "| good" not in page and "bitproof run -k bad" in page


def test_against_another_run_what_changed_is_reported_and_what_stayed_is_not(make_report, make_result, localized):
    before = replace(make_report(make_result("bad"), make_result("same"), make_result("gone")), run_id="before")
    page = comment.render(make_report(localized, make_result("same"), make_result("new")), before)
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("|")][2:]
    assert [[cell.strip() for cell in row][:2] for row in rows] == [
        ["bad", "EQUAL"], ["new", "not there"], ["gone", "EQUAL"],
    ]  # fmt: skip
    assert rows[-1][2].strip() == "not run"


def test_another_cause_is_a_change_and_other_times_are_none(make_report, localized):
    first = localized.first_divergence
    other = replace(localized, first_divergence=replace(first, call=replace(first.call, operator="mul")))
    now = make_report(localized)
    assert "| bad" in comment.render(now, make_report(other))
    same = comment.render(now, make_report(replace(localized, seconds=replace(localized.seconds, total=99.0))))
    assert "Nothing changed since run" in same and "| bad" not in same


def test_a_comment_of_thousands_of_cases_fits(make_report, make_result):
    results = [make_result(f"case_{n}", "DIFFERENT") for n in range(2000)]
    page = comment.render(make_report(*results))
    assert len(page) <= comment.MAX_CHARS and "The table is cut" in page
