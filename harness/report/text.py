"""Small texts that every form of the report shares."""

from __future__ import annotations

import shlex
from typing import Any

from harness.records import CaseResult, Divergence, Report, Verdict


def replay_command(report: Report, result: CaseResult) -> str:
    """The command that runs one case again as this run did."""
    options = report.options if result.options is None else result.options
    return shlex.join(["bitproof", "run", "-k", result.case.name, *options])


def expectation(result: CaseResult) -> str:
    """The verdict a case should get, with the kinds that should differ: `DIFFERENT (grad, param)`."""
    differs = f" ({', '.join(result.case.differs)})" if result.case.differs else ""
    return f"{result.case.expected}{differs}"


def outcome(result: CaseResult) -> str:
    """The verdict a case got, with the kinds that differ at the first differing step."""
    differs = f" ({', '.join(result.differing_kinds)})" if result.differing_kinds else ""
    return f"{result.verdict.value}{differs}"


def tally(report: Report) -> str:
    """How many cases came to each verdict, and how many were not run: `2 EQUAL, 1 CLOSE, 1 not run`."""
    counts = [(sum(result.verdict == verdict for result in report.cases), verdict.value) for verdict in Verdict]
    counts.append((len(report.not_run), "not run"))
    return ", ".join(f"{count} {name}" for count, name in counts if count)


def closeness(result: CaseResult) -> str:
    """The largest error against the bound, and where: `largest relative error 0.0031 (bound 0.01) at step 1, ...`."""
    found = result.closeness
    assert found is not None
    size = "infinite" if found.largest_error is None else f"{found.largest_error:.3g}"
    key = found.largest
    place = f"step {key.step}, rank {key.rank}, {key.kind} {key.name}"
    return f"largest relative error {size} (bound {found.bound:g}) at {place}"


def systems(result: CaseResult) -> str:
    """The two systems: `eager_chunked / graph`."""
    return f"{result.case.reference} / {result.case.candidate}"


def locate(divergence: Divergence | None) -> str:
    """Where two systems first part: `step 0, rank 3, grad layers.1.moe.router.gate.weight`."""
    if divergence is None:
        return ""
    return f"step {divergence.step}, rank {divergence.rank}, {divergence.kind} {divergence.name}"


def blame(divergence: Divergence | None) -> str:
    """The operator call to blame: `mul of layers.1.moe (forward, chunk 1) on rank 0 is ... (moe.py:68)`."""
    if divergence is None or divergence.operator is None:
        return ""
    chunk = "" if divergence.chunk is None else f", chunk {divergence.chunk}"
    place = f"{divergence.operator} of {divergence.module or 'the step itself'} ({divergence.direction}{chunk})"
    facts = [f"node {divergence.node}" if divergence.node else None, divergence.source]
    where = ", ".join(filter(None, facts))
    return f"{place} on rank {divergence.operator_rank} {divergence.how}" + (f" ({where})" if where else "")


def total_seconds(result: CaseResult) -> float:
    """The case's time: its `total` where one is given, else the sum of its parts."""
    if isinstance(total := result.seconds.get("total"), (int, float)):
        return float(total)
    return sum((seconds for _, seconds in flatten_seconds(result)), 0.0)


def flatten_seconds(result: CaseResult) -> list[tuple[str, float]]:
    """Every measured part of a case, nested ones as `passes.chunk`."""
    parts = flatten(result.seconds)
    return [(name, float(value)) for name, value in parts if isinstance(value, (int, float))]


def flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested values by dotted names: `packages.torch`."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return flat


def shorten(text: str, limit: int, source: str = "the rank logs have them") -> str:
    """A long text's beginning and end, with a sentence about what was left out between, and where it is."""
    if len(text) <= limit:
        return text
    head, tail = limit // 4, limit - limit // 4
    return f"{text[:head]}\n... {len(text) - limit} characters left out; {source} ...\n{text[-tail:]}"
