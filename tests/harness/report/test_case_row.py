"""A case's row, and that every form of a report shows it."""

from __future__ import annotations

import re

from bitproof.builtin_cases import CASES
from bitproof.harness.records import CaseResult, Divergence, Report, Verdict
from bitproof.harness.report import markdown, terminal
from bitproof.harness.report.case_row import row_of
from bitproof.harness.report.ci import junit
from bitproof.harness.report.html import document
from tests.harness.reports import COMPARED, ENVIRONMENT, result


def report_of(found: CaseResult) -> Report:
    return Report(run_id="20260102T030405Z-abcdef", exit_status=1, environment=dict(ENVIRONMENT), cases=[found])


def test_verdicts_have_signs_of_their_own() -> None:
    rows = [row_of(result(CASES["moe_seq"], verdict.value)) for verdict in Verdict]
    assert len({row.sign for row in rows}) == len(Verdict)


def test_what_follows_the_verdict_is_the_rest_of_the_outcome() -> None:
    row = row_of(result(CASES["moe_seq"], "DIFFERENT", differing_kinds=("grad",)))
    assert (row.verdict, row.outcome, row.detail) == ("DIFFERENT", "DIFFERENT (grad)", " (grad)")
    assert row.sentence == "DIFFERENT (grad), expected EQUAL"


def test_every_form_of_a_report_shows_the_row() -> None:
    first = Divergence(step=3, rank=1, kind="grad", name="layers.0.moe.w1")
    none = dict.fromkeys(COMPARED, 0)
    facts = {"compared": none | {"grad": 7654}, "mismatched": none | {"grad": 4321}, "first_divergence": first}
    found = result(CASES["moe_seq"], "DIFFERENT", seconds=12.5, differing_kinds=("grad",), **facts)
    row, report = row_of(found), report_of(found)
    assert (row.compared, row.mismatched, row.seconds) == (7654, 4321, 12.5)
    assert row.where == "step 3, rank 1, grad layers.0.moe.w1"
    text = "\n".join(terminal.case_lines(report, found))
    for form in (document.render(report), junit.render(report), markdown.render(report), text):
        plain = re.sub(r"<[^>]*>", "", form) if form.startswith("<!") else form
        assert row.name in plain and row.outcome in plain and row.where in plain
    assert all(re.search(r"\b7,?654\b", form) for form in (document.render(report), markdown.render(report)))
