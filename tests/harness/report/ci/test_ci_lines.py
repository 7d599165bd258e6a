from __future__ import annotations

from bitproof.harness.report.ci import ci_lines


def test_a_line_names_file_and_line_of_the_call_to_blame(make_report, localized):
    [line] = ci_lines.render(make_report(localized)).splitlines()
    assert line.startswith("::error file=moe.py,line=68,title=bitproof bad::bad: DIFFERENT (")
    assert "; to blame: gate<b> of layers.1.moe (backward" in line


def test_a_report_that_is_as_expected_has_none(make_report, make_result):
    assert ci_lines.render(make_report(make_result())) == ""


def test_what_ends_a_property_or_a_text_is_spelled_out(make_report, make_result):
    result = make_result("broken", "ERROR", error="100%\n::error::x", losses={"reference": [], "candidate": []})
    assert ci_lines.render(make_report(result)) == (
        "::error title=bitproof broken::broken: ERROR, expected EQUAL; 100%25\n"
    )


def test_of_many_findings_the_rest_is_a_number(make_report, make_result):
    results = [make_result(f"c{n}", "DIFFERENT") for n in range(60)]
    lines = ci_lines.render(make_report(*results)).splitlines()
    assert len(lines) == 51 and lines[-1] == "::error title=bitproof::10 more findings, in report.md"
