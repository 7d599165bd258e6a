"""Describe a case's first difference in full detail: the output of `bitproof localize`, and localize.json."""

from __future__ import annotations

import json
from collections.abc import Iterator

from bitproof.harness.records import NO_CALL, SCHEMA, CaseResult, TensorDifference, Verdict
from bitproof.harness.report.json import divergence_to_dict
from bitproof.harness.report.text import (
    CHAIN,
    blame,
    blame_label,
    chain_rows,
    evidence,
    locate,
    outcome,
)


def story_lines(result: CaseResult) -> Iterator[str]:
    """Yield the lines about a case's first difference: its tensor, the blamed call, and the calls from that call to the
    tensor.
    """
    divergence = result.first_divergence
    if divergence is None:
        nothing = (
            "nothing to localize: EQUAL" if result.verdict == Verdict.EQUAL else f"no difference: {result.verdict}"
        )
        yield f"{result.case.name}: {nothing}"
        return
    yield f"{result.case.name}: {outcome(result)}"
    yield f"  first divergence: {locate(divergence)}{_extent(divergence.tensor)}"
    call = divergence.call
    if call is None:
        # Without a call, either a search ended without finding one, which a remark states, or no search has ended.
        looked = NO_CALL in result.remarks
        yield "  to blame: " + (
            "no operator call explains it" if looked else "not known, as no search for a call finished"
        )
        return
    yield f"  {blame_label(divergence)}: {blame(divergence)}"
    yield from (f"  {label}: {value}" for label, value in evidence(call))
    yield f"  on ranks: {call.ranks}"
    if call.output is not None:
        yield f"  its output{_extent(call.output)}"
    if rows := chain_rows(call):
        # Imported here, since it takes time and most cases have no chain.
        from tabulate import tabulate

        yield ""
        yield "  from it to that tensor, each call by what the one before gave:"
        yield from (f"  {line}" for line in tabulate(rows, CHAIN, "plain", disable_numparse=True).splitlines())


def render(result: CaseResult) -> str:
    """Return the text of localize.json: the case's verdict and its first divergence."""
    values = {
        "schema": SCHEMA,
        "case": result.case.name,
        "verdict": result.verdict,
        "reference": result.case.reference,
        "candidate": result.case.candidate,
        "first_divergence": divergence_to_dict(result.first_divergence),
        "error": result.error,
    }
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def _extent(found: TensorDifference) -> str:
    if found.elements is None:
        return ""
    ulp = "" if found.max_ulp is None else f", at most {found.max_ulp} ULP"
    bits = f"{found.reference_bits} against {found.candidate_bits} first"
    return f": {found.elements_differing} of {found.elements} elements{ulp}, {bits}"
