"""Write annotations: unexpected results as lines that make GitHub show them next to the code.

Each result is a line, such as `::error file=mine.py,line=9,title=bitproof moe_seq::text`. GitHub's runners execute
these lines, so untrusted text is escaped.
"""

from __future__ import annotations

from bitproof.harness.printable import one_line
from bitproof.harness.records import Report
from bitproof.harness.report.ci.problems import Objection, objections
from bitproof.harness.report.text import shorten

MAX_CHARS = 4_000
MAX_FINDINGS = 50
"""The most annotations that are written. GitHub shows only ten of them per step of a workflow."""


def render(report: Report) -> str:
    found = list(objections(report))
    lines = [_line(objection) for objection in found[:MAX_FINDINGS]]
    if len(found) > MAX_FINDINGS:
        lines.append(f"::error title=bitproof::{len(found) - MAX_FINDINGS} more findings, in report.md")
    return "".join(f"{line}\n" for line in lines)


def _line(objection: Objection) -> str:
    facts = {"file": objection.path, "line": None if objection.line is None else str(objection.line)}
    facts["title"] = f"bitproof {objection.case}"
    text = ",".join(f"{name}={_value(value)}" for name, value in facts.items() if value is not None)
    return f"::error {text}::{_text(shorten(objection.message, MAX_CHARS, 'report.md has it'))}"


def _text(value: str) -> str:
    # Runners decode `%0A` and `%0D`, so a percent sign of the text is escaped. `one_line` has removed line breaks.
    return one_line(value).replace("%", "%25")


def _value(value: str) -> str:
    # In a property, a comma would begin the next one, and two colons would end them all.
    return _text(value).replace(":", "%3A").replace(",", "%2C")
