"""Write report.md, a summary that fits a CI job's page: verdicts first, details in collapsible blocks.

GitHub accepts 1 MiB per summary. Long texts are cut, and a sentence counts the rows left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bitproof.harness.records import CaseResult, Divergence, PassReport, Report
from bitproof.harness.report import blocks, causes, text
from bitproof.harness.report.case_row import row_of
from bitproof.harness.report.markdown_text import Strong, code_block, folded, inline, strong, table_of
from bitproof.harness.report.schema import FlatDivergence
from bitproof.harness.report.sections import histogram, sections
from bitproof.harness.report.status import exit_status

MAX_ERROR_CHARS = 16_000
MAX_BYTES = 1_000_000
MAX_TABLE_BYTES = 300_000
MAX_CELL_CHARS = 400
MAX_TENSORS = 50
MAX_LOSSES = 100
MAX_VALUES = 100
MAX_VALUE_CHARS = 1_000

STATUS_TEXTS = {
    0: "every case got its expected verdict",
    1: "some case did not get its expected verdict",
    2: "the call or a case is wrong",
    3: "some case could not be judged",
}
FAULTS_TEXTS = {
    1: "a fault was not caught, or a rewrite that keeps every bit was flagged",
    3: "some fault could not be judged",
}
"""The texts for runs whose exit status is decided by their injected faults."""


def status_text(report: Report) -> str:
    """Return a sentence that explains the exit status.

    If injected faults lead to a worse status than the cases alone, the sentence is about these faults.
    """
    # The faults decided the status if the cases alone would have another.
    status = report.exit_status
    if report.faults and status != exit_status(report.cases, is_shard=report.shard is not None):
        return FAULTS_TEXTS.get(status, "unknown")
    return STATUS_TEXTS.get(status, "unknown")


def render(report: Report) -> str:
    """Return the whole summary as Markdown. Unexpected cases come first."""
    head = [
        f"# bitproof {inline(report.run_id)}",
        *(f"## {inline(_brief(line))}" for line in text.headlines(report)),
        f"Exit status {report.exit_status}: {status_text(report)}.",
        *([f"Shard {report.shard} of {len(report.shard.selection)} selected cases."] if report.shard else []),
        f"Verdicts: {text.tally(report)}." if report.cases else "No case was run.",
        *([_verdict_table(report.cases)] if report.cases else []),
        *_causes(report),
        *(strong(_brief(remark)) for remark in text.remarks(report)),
        *_not_run(report),
    ]
    foot = folded("Environment", _bounded_table(("what", "value"), list(text.leaves(report.environment))))
    # Details get the bytes that all the rest leaves.
    room = MAX_BYTES - sum(_size(block) for block in (*head, foot))
    return "\n\n".join([*head, *_details(report, room), foot]) + "\n"


def summarize(results: Sequence[CaseResult], environment: Mapping[str, Any] | None = None) -> str:
    """Return the summary of results without a run folder, for example for the message of a failing test."""
    return render(
        Report(run_id="", exit_status=exit_status(results), environment=dict(environment or {}), cases=list(results))
    )


def _verdict_table(results: Iterable[CaseResult]) -> str:
    headers = (
        "case",
        "verdict",
        "expected",
        "as expected",
        "ran on",
        "reference / candidate",
        "compared",
        "mismatched",
    )
    rows = [
        (
            row.name,
            Strong(row.outcome),
            row.expectation,
            "yes" if row.as_expected else Strong("no"),
            row.place,
            row.systems,
            row.compared,
            row.mismatched,
            row.where,
            f"{row.seconds:.1f}",
        )
        for row in map(row_of, results)
    ]
    return _bounded_table((*headers, "first divergence", "seconds"), rows)


def _causes(report: Report) -> Iterator[str]:
    shown, more = causes.explained(report)
    for result in shown:
        head = f"### {inline(_brief(f'{result.case.name}: {row_of(result).sentence}'))}"
        rows = [f"- {inline(label)}: {inline(found)}" for label, found in causes.lines_of(result)]
        replay = text.replay_command(report, result)
        # A command cannot be shortened: a cut command would be wrong.
        again = [code_block(replay)] if len(replay) <= MAX_VALUE_CHARS else []
        yield "\n\n".join(filter(None, [head, "\n".join(rows), *again]))
    if more:
        yield f"{more} more cases are not as expected; the table has them."


def _not_run(report: Report) -> Iterator[str]:
    if report.not_run:
        rows = list(report.not_run.items())
        yield "Not run here, so neither passed nor failed:\n\n" + _bounded_table(("case", "reason"), rows)


def _bounded_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    rows = [[_brief(value) for value in row] for row in rows]
    # Each row of a Markdown table is padded to the widest row, so sizes of rows do not simply add up: halve the rows.
    shown = len(rows)
    while _size(table := table_of(headers, rows[:shown])) > MAX_TABLE_BYTES:
        shown //= 2
    left_out = (
        f"\n\n{len(rows) - shown} more rows are left out here; report.json has them." if shown < len(rows) else ""
    )
    return table + left_out


def _brief(value: Any) -> Any:
    return text.shorten(value, MAX_CELL_CHARS, "report.json has them") if isinstance(value, str) else value


def _size(block: str) -> int:
    # With the empty line before it. A character that cannot be encoded counts as its escape.
    return len(block.encode(errors="backslashreplace")) + 2


def _details(report: Report, room: int) -> Iterator[str]:
    room -= 100  # room for the sentence about omitted cases
    left_out = 0
    # A case whose block is too large is left out, and smaller blocks after it may still fit.
    for result in sorted(report.cases, key=lambda result: result.as_expected):
        block = folded(f"{result.case.name}: {text.outcome(result)}", _case_details(report, result))
        if _size(block) > room:
            left_out += 1
            continue
        room -= _size(block)
        yield block
    if left_out:
        yield f"Details of {left_out} more cases are left out here; report.json has them."


def _case_details(report: Report, result: CaseResult) -> str:
    # Most needed first, as a reader may stop anywhere: how to repeat the case, why it failed, then measurements.
    parts = [f"Replay:\n\n{code_block(text.replay_command(report, result))}"]
    for name, found in result.checks.items():
        parts += [f"### Check {inline(name)}", *blocks.markdown(found.blocks, blocks.reasons_of(found))]
    if result.error:
        parts.append(f"### Error\n\n{code_block(text.shorten(result.error, MAX_ERROR_CHARS))}")
    if result.first_divergence:
        parts.append(f"### First divergence\n\n{_divergence(result.first_divergence)}")
    for title, found_blocks in sections(result):
        parts += [f"### {title}", *blocks.markdown(found_blocks)]
    kinds = [(kind, result.compared[kind], result.mismatched[kind]) for kind in result.compared]
    parts.append(f"### Records\n\n{table_of(('kind', 'compared', 'mismatched'), kinds)}")
    if result.differing:
        tensors, left_out = text.tensor_rows(result, MAX_TENSORS)
        tensors += [("...", f"{left_out} more, in report.json", "", "", "")] if left_out else []
        table = table_of(("kind", "tensor", "steps", "first step", "ranks"), tensors)
        parts.append(f"### Tensors that differ\n\n{table}")
    if losses := list(_loss_rows(result)):
        parts.append(f"### Losses of rank 0\n\n{table_of(('step', 'loss', 'reference', 'candidate', 'same'), losses)}")
    if seconds := text.flatten_seconds(result):
        rows = [(name, f"{value:.3f}") for name, value in seconds]
        parts.append(f"### Seconds\n\n{table_of(('part', 'seconds'), rows)}")
    if result.passes:
        headers = ("pass", "seconds", "nodes before", "nodes after")
        passes = [(p.name, f"{p.seconds:.3f}", p.nodes_before, p.nodes_after) for p in result.passes]
        parts += [f"### Passes\n\n{table_of(headers, passes)}", *_pass_details(result.passes)]
    return "\n\n".join([inline(_brief(result.where)), *(strong(_brief(remark)) for remark in result.remarks), *parts])


def _divergence(first: Divergence) -> str:
    flat = FlatDivergence.of(first)
    # Plain facts are rows of this table; lists and nested values have tables of their own below.
    known = [(name.rstrip("_"), value) for name, value in vars(flat).items() if isinstance(value, (str, int))]
    parts = [table_of(("what", "value"), [(name, _brief(value)) for name, value in known])]
    if shown := text.evidence(first.call):
        parts.append(f"The defect, and what exchanges of values showed:\n\n{table_of(('what', 'value'), shown)}")
    if rows := text.chain_rows(first.call):
        parts.append(f"From the blamed call to this tensor:\n\n{table_of(text.CHAIN, rows)}")
    sides = (
        ("of the tensor", first.tensor),
        ("of the blamed call's output", first.call.output if first.call else None),
    )
    for what, difference in sides:
        if difference and difference.histogram:
            table = histogram(f"Elements {what} by ULPs", {"elements": difference.histogram})
            parts += blocks.markdown([table])
        if rows := text.sample_rows(difference):
            headers = ("index", "reference", "candidate", "reference value", "candidate value")
            parts.append(f"The first elements {what} that differ:\n\n{table_of(headers, rows)}")
    return "\n\n".join(parts)


def _pass_details(passes: Iterable[PassReport]) -> Iterator[str]:
    for entry in passes:
        known = {"settings": entry.settings, "facts": entry.facts}
        tables = [f"{name}:\n\n{_values(values)}" for name, values in known.items() if values]
        if changed := entry.changed:
            rows = [(name, before, after, f"{after - before:+d}") for name, (before, after) in changed.items()]
            tables.append(f"calls:\n\n{table_of(('operator', 'before', 'after', 'change'), rows)}")
        if tables:
            yield folded(f"pass {entry.name}", "\n\n".join(tables))


def _values(values: Mapping[str, Any]) -> str:
    rows = [(_brief(path), _short(value)) for path, value in text.leaves(values)]
    left_out = len(rows) - MAX_VALUES
    rows = [*rows[:MAX_VALUES], ("...", f"{left_out} more, in report.json")] if left_out > 0 else rows
    return table_of(("what", "value"), rows)


def _short(value: str) -> str:
    return text.shorten(value, MAX_VALUE_CHARS, "report.json has them")


def _loss_rows(result: CaseResult) -> Iterator[tuple[Any, ...]]:
    reference, candidate = result.losses["reference"], result.losses["candidate"]
    for step in range(min(max(len(reference), len(candidate)), MAX_LOSSES)):
        # A run that failed may have fewer losses than the other.
        left = reference[step] if step < len(reference) else "missing"
        right = candidate[step] if step < len(candidate) else "missing"
        value = f"{float.fromhex(left):.6f}" if step < len(reference) else ""
        yield result.case.first_step + step, value, left, right, "yes" if left == right else Strong("no")
