"""Explain each unexpected case in a few labelled lines, for the top of a report."""

from __future__ import annotations

from collections.abc import Iterator

from bitproof.harness.records import CaseResult, Report
from bitproof.harness.report import text

MAX_CASES = 20
"""The most cases explained at the top of a page. The table of the page has all cases."""
MAX_CHARS = 600
_LEFT_OUT = "report.json has the rest"


def explained(report: Report) -> tuple[list[CaseResult], int]:
    """Return a pair: the unexpected cases to explain at the top of a page, at most MAX_CASES, and the number of the
    others.
    """
    found = [result for result in report.cases if not result.as_expected]
    return found[:MAX_CASES], max(0, len(found) - MAX_CASES)


def lines_of(result: CaseResult) -> list[tuple[str, str]]:
    """Return the lines that explain a case, as pairs of a label and a text. For example:

    first difference: step 0, rank 3, grad layers.1.moe.w: 213 of 256 elements differ, by 16 ULPs at most
    to blame: mul.Tensor of layers.1.moe (forward, chunk 1) on rank 0 has the same inputs and ... (moe.py:68)
    pass: chunk
    """
    return [(label, text.shorten(found, MAX_CHARS, _LEFT_OUT)) for label, found in _lines(result)]


def _lines(result: CaseResult) -> Iterator[tuple[str, str]]:
    # The first line is the message; a traceback follows.
    if result.error and (first := result.error.strip().partition("\n")[0]):
        yield "error", first
    if result.first_divergence:
        divergence = result.first_divergence
        where = text.locate(divergence, result.case)
        much = text.extent(divergence.tensor)
        yield "first difference", f"{where}: {much}" if much else where
        # The label depends on the verification: "to blame", or "best candidate".
        yield text.blame_label(divergence), text.blame(divergence) or "no call was found"
        yield from text.evidence(divergence.call)
        if divergence.pass_:
            yield "pass", divergence.pass_
    for name, reason in result.objections():
        yield f"check {name}", reason
