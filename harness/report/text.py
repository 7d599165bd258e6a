"""Short texts that several forms of the report share."""

from __future__ import annotations

import shlex
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.case.case import script_of
from bitproof.harness.errors import bounded
from bitproof.harness.records import (
    ROLES,
    BlamedCall,
    CaseResult,
    ChainLink,
    Divergence,
    Drift,
    Report,
    TensorDifference,
    Verdict,
    Verification,
)
from bitproof.harness.report.source_lines import shown_line, with_shown_lines

CASE_FILE = "--case"
"""The option that selects a case by its file. Without it, `-k` selects cases by name."""

UNKNOWN_DIRECTION = "direction not known"
"""The text for an unknown direction of a call, as in the graph of a user's system."""


def replay_command(report: Report, result: CaseResult) -> str:
    options = report.options if result.options is None else result.options
    # A single case file, or a script, already names the case; then -k is not needed.
    is_named_whole = options.count(CASE_FILE) == 1 or (script_of(result.case.candidate) and "--candidate" in options)
    selection = [] if is_named_whole else ["-k", result.case.name]
    return shlex.join(["bitproof", "run", *selection, *options])


def headlines(report: Report) -> list[str]:
    """Return the headlines of all checks, with which every form of the report begins.

    For example, a headline states that a case differs although its systems were proved equal.
    """
    return [line for result in report.cases for line in headlines_of(result)]


def headlines_of(result: CaseResult) -> list[str]:
    return [found.headline for found in result.checks.values() if found.headline]


def remarks(report: Report) -> list[str]:
    """Return the remarks on a whole run. If faults were injected, the last remark is their score."""
    return [*report.remarks, *([f"bitproof faults: {report.faults}"] if report.faults else [])]


def expectation(result: CaseResult) -> str:
    """Return the expected verdict, followed by the kinds that should differ and the bound: `DIFFERENT (grad) within
    0.02`.
    """
    case = result.case
    if case.expected != "DIFFERENT":
        return case.expected
    bound = ", no bound stated" if case.differs_within is None else f" within {case.differs_within:g}"
    return f"{case.expected} ({', '.join(case.differs)}){bound}"


def outcome(result: CaseResult) -> str:
    """Return the verdict, the kinds that differ at the first differing step, objections, and short results of checks.

    Example: `DIFFERENT (grad), baseline objects, candidate DRIFTED`. An objection is a difference beyond the bound, or
    a check that objects or could not judge the case.
    """
    differs = f" ({', '.join(result.differing_kinds)})" if result.differing_kinds else ""
    beyond = " beyond the bound" if result.is_beyond_bound else ""
    objecting = [
        f", {name} objects" if found.objection else f", {name} could not judge" if found.unjudged else ""
        for name, found in result.checks.items()
    ]
    brief = [f", {found.brief}" for found in result.checks.values() if found.brief]
    return "".join([result.verdict.value, differs, beyond, *objecting, *brief])


def tally(report: Report) -> str:
    """Return a text that counts the cases by verdict, and the cases not run: `2 EQUAL, 1 CLOSE, 1 not run`."""
    counts = [(sum(result.verdict == verdict for result in report.cases), verdict.value) for verdict in Verdict]
    counts.append((len(report.not_run), "not run"))
    return ", ".join(f"{count} {name}" for count, name in counts if count)


def closeness(result: CaseResult) -> str:
    """Return a text with the largest error, its bound and its tensor: `largest relative error 0.0031 (bound 0.01) at
    step 1, ...`.
    """
    found = result.closeness
    assert found is not None
    size = "infinite" if found.largest_error is None else f"{found.largest_error:.3g}"
    key = found.largest
    place = f"step {key.step}, rank {key.rank}, {key.kind} {key.name}"
    return f"largest relative error {size} (bound {found.bound:g}) at {place}"


def drift(entries: list[Drift], sides: tuple[str, str], num_tensors: int, max_tensors: int = 10) -> Iterator[str]:
    """Yield a line for each of the first `max_tensors` tensors that differ, and a line with the number of further ones.

    `num_tensors` is the number of all tensors that differ. `sides` names the two recordings, such as ("in the
    baseline", "here").
    """
    for entry in entries[:max_tensors]:
        yield f"{entry.kind} {entry.name}: {_drift_of(entry, sides)}"
    if num_tensors > max_tensors:
        yield f"and {count(num_tensors - max_tensors, 'more tensor')}"


def _drift_of(entry: Drift, sides: tuple[str, str]) -> str:
    # From the coarsest difference to the finest: other types have no elements to compare, and values may not be stored.
    place = f"{count(entry.records, 'record')}, first at step {entry.step}, rank {entry.rank}"
    if entry.reference_type != entry.candidate_type:
        return f"{place}; {entry.reference_type} {sides[0]}, {entry.candidate_type} {sides[1]}"
    if not entry.measured:
        return f"{place}; no values kept"
    kept = "" if entry.measured == entry.records else f"in the {entry.measured} whose values are kept, "
    elements = f"{kept}{entry.elements_differing} of {count(entry.elements or 0, 'element')}"
    histogram = ", ".join(f"{bucket}: {count}" for bucket, count in entry.histogram.items())
    ulps = "" if entry.max_ulp is None else f", by at most {entry.max_ulp} ULP (elements by ULPs: {histogram})"
    return f"{place}; {elements}{ulps}; {entry.reference_bits} {sides[0]}, {entry.candidate_bits} {sides[1]}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 tensor`, `2 tensors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def systems(result: CaseResult) -> str:
    """Return the two systems of a case, such as `eager_chunked / graph`."""
    return f"{result.case.reference} / {result.case.candidate}"


def place(result: CaseResult) -> str:
    """Return the device and what transports collectives, such as `cuda, nccl`; `unknown` for a case that never ran."""
    return ", ".join(dict.fromkeys((result.device, result.collectives or result.backend)))


def locate(divergence: Divergence | None, case: Case | None = None) -> str:
    """Name the first differing record: `step 0, rank 3, grad layers.1.moe.router.gate.weight`; "" if nothing differs.

    If a system differs from itself, the text ends with that system, as in ` (graph against itself)`. Without `case`, it
    ends with the role: ` (candidate against itself)`.
    """
    if divergence is None:
        return ""
    place = f"step {divergence.step}, rank {divergence.rank}, {divergence.kind} {divergence.name}"
    return f"{place} ({self_difference(divergence, case)})" if divergence.between else place


def self_difference(divergence: Divergence, case: Case | None) -> str:
    """Return a text that names the system that differs from itself: `eager_chunked against itself under stress`.

    Without `case`, the text has the system's role instead of its name.
    """
    # `between` begins with a role: "candidate against itself under stress".
    role, _, rest = (divergence.between or "").partition(" ")
    if case is None or role not in ROLES:
        return divergence.between or ""
    # If both roles have the same system, its name alone would be ambiguous.
    twin = f"{role} " if case.reference == case.candidate else ""
    return f"{twin}{getattr(case, role)} {rest}"


def blame(divergence: Divergence | None) -> str:
    """Describe the blamed call: `mul of layers.1.moe (forward, chunk 1) on rank 0 is ... (moe.py:68)`; "" without a
    difference.

    The text may also state that the tensor equals another record of the reference, or why the blame is not verified.
    """
    if divergence is None:
        return ""
    holds = divergence.holds and f"the tensor holds what the reference has as {divergence.holds}"
    shown = divergence.call.verification if divergence.call else None
    unsure = f"not verified: {shown.reason}" if shown and shown.status == "not verified" else None
    return "; ".join(filter(None, (blame_of(divergence.call), holds, unsure)))


def blame_of(call: BlamedCall | None) -> str:
    """Describe an operator call: operator, module, rank, defect and source line; "" without a call."""
    if call is None:
        return ""
    facts = [f"node {call.node}" if call.node else None, shown_line(call.source)]
    where = ", ".join(filter(None, facts))
    place = f"{call.operator} of {call.module or 'the step itself'} ({direction_of(call)})"
    return f"{place} on rank {call.rank} {call.how}" + (f" ({where})" if where else "")


def blame_label(divergence: Divergence) -> str:
    """Return the label of the blamed call: "to blame", or "best candidate" if the blame was tested and not confirmed.

    The test is a run with the other system's value.
    """
    found = divergence.call and divergence.call.verification
    return "best candidate" if found and found.status == "not verified" else "to blame"


def evidence(call: BlamedCall | None) -> list[tuple[str, str]]:
    """Return pairs (label, text): the blamed call's defect, and the result of running with the other system's values.

    The list is empty if that result does not support the blame even in part. For example:

        expected: eps=1e-05
        found: eps=0.001
        verified: with the reference's value here, all 34,240 tensors of the step are equal, and the reference with ...
        another cause: native_layer_norm of layers.3 (forward) on rank 0 has the same inputs and ...: 12 tensors
    """
    found = call.verification if call else None
    if call is None or found is None or found.status == "not verified":
        return []
    sides = [("expected", call.expected), ("found", call.found)]
    return [*((label, value) for label, value in sides if value), *_verification(found)]


def _verification(found: Verification) -> list[tuple[str, str]]:
    num_alike, several = len(found.calls) + found.calls_left_out, bool(found.causes)
    # "here" is the blamed call; further calls with its defect, and further causes, are counted.
    here = "the reference's value here" if not num_alike else "the reference's values here"
    also = f" and at {count(num_alike, 'more call')} with the same defect" if num_alike else ""
    others = f" and at {count(len(found.causes), 'more cause')}" if several else ""
    became = f"{found.differing - found.remaining:,} of the {count(found.differing, 'tensor')} that differ become equal"
    if found.status == "verified":
        line = f"with {here}{also}{others}, all {found.tensors:,} tensors of the step are equal, and the reference "
        line += f"with the candidate's {'value' if here.endswith('value here') and not several else 'values'} there "
        lines = [("verified", f"{line}gives the candidate's step")]
    else:
        lines = [("verified in part", f"with {here}{also}{others}, {became}; {found.reason}")]
    lines += [("the same defect", with_shown_lines(text)) for text in found.calls]
    lines += [("the same defect", f"and {count(found.calls_left_out, 'more call')}")] if found.calls_left_out else []
    return lines + [
        ("another cause", f"{with_shown_lines(other.call)}: {count(other.accounts, 'tensor')} became equal with it")
        for other in found.causes
    ]


def direction_of(call: BlamedCall | ChainLink) -> str:
    """Return a call's direction, and its chunk, micro-batch and part if it has them: `forward, chunk 1`."""
    text = (call.direction or UNKNOWN_DIRECTION) + ("" if call.chunk is None else f", chunk {call.chunk}")
    text += "" if call.micro_batch is None else f", micro-batch {call.micro_batch}"
    return text + ("" if call.part is None else f", {call.part}")


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: `0-3, 6`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def tensor_rows(result: CaseResult, limit: int) -> tuple[list[tuple[str, ...]], int]:
    """Return a pair: rows about the tensors that differ, at most `limit`, and the number of further tensors.

    A row has kind, name, number of differing steps, first differing step, and ranks. Rows are in the order of
    computation.
    """
    rows: list[tuple[str, ...]] = []
    # `compared` has the kinds in the order of a step, and `differing` the tensors in the order
    # of their first difference.
    for kind in result.compared:
        for name, steps in result.differing.get(kind, {}).items():
            ranks = {rank for found in steps.values() for rank in found}
            rows.append((kind, name, str(len(steps)), min(steps, key=int), rank_ranges(ranks)))
    return rows[:limit], max(0, len(rows) - limit)


def extent(difference: TensorDifference | ChainLink | None) -> str:
    """Return the size of a tensor's difference: `213 of 256 elements differ, by 16 ULPs at most`; "" if unknown.

    If dtypes or shapes differ, return a text with these: `float32[32] in the reference, none in the candidate`.
    """
    if isinstance(difference, TensorDifference):
        types = difference.reference_type, difference.candidate_type
        if None not in types and types[0] != types[1]:
            # A missing gradient is recorded as a tensor without elements.
            here, there = ("none" if str(each).endswith("[0]") else each for each in types)
            return f"{here} in the reference, {there} in the candidate"
    if difference is None or difference.elements_differing is None or difference.elements is None:
        return ""
    max_ulp = difference.max_ulp
    by = "" if max_ulp is None else f", by {max_ulp:,} ULP{'s' if max_ulp != 1 else ''} at most"
    return f"{difference.elements_differing:,} of {difference.elements:,} elements differ{by}"


def value_of(bits: str, dtype: str) -> str:
    """Return, as text, the number that has these bits: `0x3f80` of bfloat16 is `1`; "" for other dtypes and invalid
    bits.
    """
    # bfloat16 is the upper half of a float32, so zeros complete it.
    formats = {"float16": (">e", ""), "bfloat16": (">f", "0000"), "float32": (">f", ""), "float64": (">d", "")}
    if dtype not in formats:
        return ""
    code, padding = formats[dtype]
    try:
        return f"{struct.unpack(code, bytes.fromhex(bits.removeprefix('0x') + padding))[0]:.9g}"
    except (ValueError, struct.error):
        return ""


def sample_rows(difference: TensorDifference | None) -> list[tuple[str, ...]]:
    """Return a row for each of the first few differing elements: index, bits in both systems, values in both systems.

    A value that is unknown is "".
    """
    if difference is None:
        return []
    dtype = (difference.reference_type or "").partition("[")[0]
    return [
        (str(index), reference, candidate, value_of(reference, dtype), value_of(candidate, dtype))
        for index, reference, candidate in difference.samples or ()
    ]


CHAIN = ("rank", "operator", "module", "direction", "changed", "line", "left out before")


def chain_rows(call: BlamedCall | None) -> list[tuple[str, ...]]:
    """Return the calls from the blamed call to the differing record, as rows of a table. `CHAIN` has its headers."""
    return [
        (
            str(link.rank),
            link.operator,
            link.module or "the step itself",
            direction_of(link),
            extent(link),
            shown_line(link.source),
            f"{link.left_out} call{'' if link.left_out == 1 else 's'}" if link.left_out else "",
        )
        for link in (call.chain if call else None) or ()
    ]


def total_seconds(result: CaseResult) -> float:
    """Return the case's time in seconds: its measured `total`, or the sum of its parts if no total was measured."""
    if (total := result.seconds.total) is not None:
        return total
    return sum((seconds for _, seconds in flatten_seconds(result)), 0.0)


def flatten_seconds(result: CaseResult) -> list[tuple[str, float]]:
    """Return, for each measured part of a case's time, its name and seconds; nested parts have names such as
    `passes.chunk`.
    """
    return [(name, value) for name, value in flatten(result.seconds.known()) if value is not None]


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested dicts as pairs of a dotted name, such as `packages.torch`, and a value."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return flat


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield, for each leaf of nested values, a pair: its path, such as `buckets[0].group`, and its text.

    A list of plain values is a single leaf.
    """
    # An empty dict within others is a leaf, so that its name is shown; an empty whole has no leaf.
    if isinstance(value, dict) and (value or not path):
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif isinstance(value, list) and value:
        yield path, ", ".join(map(str, value))
    else:
        yield path, "" if value is None else str(value)


def shorten(text: str, limit: int, source: str = "the rank logs have them") -> str:
    """Shorten a text that is longer than `limit` to its start and end; return a shorter text unchanged.

    Between start and end, the result states the number of omitted characters, and `source`, which says where these can
    be found.
    """
    return bounded(text, limit, source)
