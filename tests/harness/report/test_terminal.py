from __future__ import annotations

import io

from harness.report import terminal


def printed(report) -> str:
    stream = io.StringIO()
    terminal.print_report(report, stream)
    return stream.getvalue()


def test_every_case_has_a_row_and_only_unexpected_ones_a_paragraph(report):
    text = printed(report)
    for name in ("good", "bad", "meant", "broken", "lost"):
        assert f"\n  {name} " in text
    assert "bad: DIFFERENT (grad, param), expected EQUAL\n  first divergence: step 0, rank 3, grad" in text
    assert "  replay: bitproof run -k bad --steps 2" in text
    assert "good: " not in text
    assert "meant: " not in text


def test_an_error_is_told_in_full(report):
    assert "lost: UNVERIFIED, expected EQUAL\n  the candidate recording is empty\n" in printed(report)


def test_brackets_in_an_error_are_not_taken_for_markup(make_report, make_result):
    result = make_result(verdict="ERROR", error="expected float32[4, 8] [red]not[/red]")
    assert "expected float32[4, 8] [red]not[/red]" in printed(make_report(result))
