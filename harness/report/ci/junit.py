r"""Write junit.xml for CI systems, with a JUnit test case for each case of the run.

- An unexpected case is a failure.
- A case that could not be judged is an error.
- A case that this machine cannot run is skipped, unless it was selected by name.
- The output of a test case states the largest error, if the case's closeness was measured.

Control characters appear as `\x1b`, since XML 1.0 cannot represent most of them. Elements follow junit-10.xsd of
Jenkins' xunit plugin, which allows no total of `skipped` for all suites.
"""

from __future__ import annotations

from xml.etree import ElementTree

from bitproof.harness.printable import printable
from bitproof.harness.records import CaseResult, Report
from bitproof.harness.report import text
from bitproof.harness.report.case_row import CaseRow, row_of
from bitproof.harness.report.status import SUCCESS, UNJUDGED, case_status

MAX_ERROR_CHARS = 64_000


def render(report: Report) -> str:
    statuses = [case_status(result) for result in report.cases]
    counts = {
        "tests": len(statuses) + len(report.not_run),
        "failures": sum(status not in (SUCCESS, UNJUDGED) for status in statuses),
        "errors": sum(status == UNJUDGED for status in statuses),
        "skipped": len(report.not_run),
        "time": f"{sum(text.total_seconds(result) for result in report.cases):.3f}",
    }
    attributes = {"name": "bitproof", **{name: str(value) for name, value in counts.items()}}
    # Both elements have the same totals, as there is a single suite; the schema has no `skipped` on the outer one.
    suites = ElementTree.Element("testsuites", {name: attributes[name] for name in attributes if name != "skipped"})
    suite = ElementTree.SubElement(suites, "testsuite", attributes)
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in [("run_id", report.run_id), ("verdicts", text.tally(report)), *text.flatten(report.environment)]:
        ElementTree.SubElement(properties, "property", {"name": printable(str(name)), "value": printable(str(value))})
    # In the order of the schema: properties first, then test cases.
    for result in report.cases:
        _add_case(suite, report, result)
    for name, reason in report.not_run.items():
        attributes = {"classname": "bitproof", "name": printable(name), "time": "0"}
        left_out = ElementTree.SubElement(suite, "testcase", attributes)
        ElementTree.SubElement(left_out, "skipped", {"message": printable(reason)})
    ElementTree.indent(suites)
    return "<?xml version='1.0' encoding='utf-8'?>\n" + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, report: Report, result: CaseResult) -> None:
    row = row_of(result)
    attributes = {"classname": f"bitproof.{result.case.family}", "name": row.name, "time": f"{row.seconds:.3f}"}
    case = ElementTree.SubElement(suite, "testcase", {name: printable(value) for name, value in attributes.items()})
    if case_status(result) != SUCCESS:
        _add_problem(case, report, result, row)
    if result.closeness:
        output = ElementTree.SubElement(case, "system-out")
        output.text = printable(f"{row.outcome}: {text.closeness(result)}")


def _add_problem(case: ElementTree.Element, report: Report, result: CaseResult, row: CaseRow) -> None:
    message = row.sentence
    if result.first_divergence:
        message += f"; first at {row.where}"
        if blamed := text.blame(result.first_divergence):
            message += f"; to blame: {blamed}"
    reasons = [f"check {name}: {reason}" for name, reason in result.objections()]
    message = "; ".join([*text.headlines_of(result), message, *reasons])
    tag = "error" if case_status(result) == UNJUDGED else "failure"
    # Viewers show the message in lists of tests, and the text, which repeats it, on the test's own page.
    problem = ElementTree.SubElement(case, tag, {"type": result.verdict.value, "message": printable(message)})
    error = text.shorten(result.error or "", MAX_ERROR_CHARS)
    problem.text = printable("\n".join([message, *([error] if error else []), text.replay_command(report, result)]))
