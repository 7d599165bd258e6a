"""report.html: the whole report as one page that asks nothing of the network and runs no script.

The template beside this file lays it out; here is what it shows, cut to what a browser and a CI system's
artifact viewer take well: what is left out is told, and stands in report.json. Everything is escaped.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness.records import BUCKETS, CaseResult, Divergence, Report, Verdict
from harness.report import text
from harness.report.markdown import STATUS_TEXTS

TEMPLATE = Path(__file__).with_name("report.html.jinja")

SIDES = ("reference", "candidate")
SIGNS = {
    Verdict.EQUAL: "=",
    Verdict.CLOSE: "≈",
    Verdict.DIFFERENT: "≠",
    Verdict.NONDETERMINISTIC: "~",
    Verdict.UNVERIFIED: "?",
    Verdict.ERROR: "!",
}

# Limits of one page, shared by its cases.
MAX_CELLS = 6_000
ROW_CELLS = 6  # as many as a row's own markup takes the room of
MAX_PASS_ROWS = 2_500
MAX_ERRORS_CHARS = 100_000
MAX_ERROR_CHARS = 16_000
MAX_COLUMNS = 40
MAX_POINTS = 400
MAX_LOSSES = 40
MAX_VALUES = 12
MAX_VALUE_CHARS = 300
MAX_REASON_CHARS = 2_000

# What no page can show: control characters, lone surrogates, noncharacters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclasses.dataclass(frozen=True)
class Limits:
    """A case's share of the page: heatmap cells, characters of its error, rows of each pass's tables."""

    cells: int
    error_chars: int
    pass_rows: int


def render(report: Report) -> str:
    """The page. Cases that are not as expected come first, unfolded."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    results = sorted(report.cases, key=lambda result: result.as_expected)
    num_passes = sum(len(result.passes) for result in results)
    limits = Limits(
        cells=_fair_share(map(_wanted_cells, results), MAX_CELLS),
        error_chars=_fair_share(
            (min(len(result.error or ""), MAX_ERROR_CHARS) for result in results), MAX_ERRORS_CHARS
        ),
        pass_rows=max(3, min(MAX_VALUES, MAX_PASS_ROWS // max(1, num_passes))),
    )
    page: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        status=STATUS_TEXTS.get(report.exit_status, "unknown"),
        tally=text.tally(report),
        rows=[_row(result) for result in report.cases],
        cases=[_case(report, result, limits) for result in results],
        not_run=[(name, text.shorten(reason, MAX_REASON_CHARS)) for name, reason in report.not_run.items()],
        environment=_values(report.environment, 100),
    )
    return page


def _fair_share(wanted: Iterable[int], total: int) -> int:
    """The most that each may have, so that all have no more than the total together; who wants less leaves the rest."""
    waiting = sorted(wanted)
    for number, wants in enumerate(waiting):
        share = total // (len(waiting) - number)
        if wants > share:
            return share
        total -= wants
    return max(waiting, default=0)


def _row(result: CaseResult) -> dict[str, Any]:
    """A case's line in the table of verdicts."""
    return {
        "name": result.case.name,
        "verdict": result.verdict.value,
        "sign": SIGNS[result.verdict],
        "expectation": text.expectation(result),
        "as_expected": result.as_expected,
        "compared": sum(result.compared.values()),
        "mismatched": sum(result.mismatched.values()),
        "seconds": text.total_seconds(result),
        "detail": text.outcome(result).removeprefix(result.verdict.value),
        "where": text.locate(result.first_divergence, result.case),
    }


def _case(report: Report, result: CaseResult, limits: Limits) -> dict[str, Any]:
    """Everything that the page tells of a case."""
    case, parallelism = result.case, result.case.parallelism
    chunking = case.chunking and f"{case.chunking.modules} in two along {case.chunking.dim}"
    about = [
        ("compared", f"{case.candidate} against {case.reference}"),
        ("model", f"{case.model.family} {case.model.flavor}"),
        ("split", chunking or "nothing"),
        ("run", f"{result.world_size} ranks, {result.steps} steps, {result.device}, {result.backend}"),
        ("parallel", f"ep {parallelism.ep}, tp {parallelism.tp}"),
        ("second runs", _sides({side: verdict or "not made" for side, verdict in result.control.items()})),
    ]
    if memory := {side: f"{mib:,.1f} MiB" for side, mib in result.memory.items() if mib is not None}:
        about.append(("peak memory", _sides(memory)))
    if result.stress:
        about.append(("under stress", _sides({side: verdict or "not run" for side, verdict in result.stress.items()})))
    return _row(result) | {
        "replay": text.replay_command(report, result),
        "about": about,
        "error": text.shorten(result.error or "", limits.error_chars),
        "divergence": result.first_divergence and _divergence(result, result.first_divergence),
        "closeness": result.closeness and _closeness(result),
        "kinds": _kind_heat(result),
        "tensors": _tensor_heat(result, limits.cells),
        "losses": _losses(result),
        "passes": _passes(result.passes, limits.pass_rows),
        "seconds_of": [(name, value) for name, value in text.flatten_seconds(result) if not name.startswith("passes.")],
        "logs": _logs(result.logs),
        "baselines": text.shorten("\n".join(text.baselines(result, MAX_VALUES)), MAX_ERROR_CHARS, "report.json has it"),
    }


def _sides(values: dict[str, str]) -> str:
    return ", ".join(f"{side} {value}" for side, value in values.items())


def _values(value: Any, limit: int = MAX_VALUES) -> list[tuple[str, str]]:
    """Nested values as rows of path and value."""
    rows = [(path, text.shorten(leaf, MAX_VALUE_CHARS, "report.json has them")) for path, leaf in text.leaves(value)]
    return [*rows[:limit], *([("...", f"{len(rows) - limit} more, in report.json")] if len(rows) > limit else [])]


def _divergence(result: CaseResult, first: Divergence) -> dict[str, Any]:
    """The first differing tensor and the call to blame, each with how far the two sides are apart."""
    types = [first.reference_type, first.candidate_type]
    sides = ("first run", "second run") if first.between else SIDES
    return {
        "where": text.locate(first, result.case),
        "sides": sides,
        "types": types[0] if types[0] == types[1] else ", ".join(map("{}: {}".format, sides, types)),
        "blame": text.blame(first),
        "ranks": first.operator_ranks if "," in (first.operator_ranks or "") else "",
        "apart": [
            {
                "of": "The tensor",
                "extent": text.extent(first.elements_differing, first.elements, first.max_ulp),
                "bars": _bars(first.histogram),
                "samples": text.sample_rows(first.samples, first.reference_type),
            },
            {
                "of": "The blamed call's output",
                "extent": text.extent(first.output_elements_differing, first.output_elements, first.output_max_ulp),
                "bars": _bars(first.output_histogram),
                "samples": text.sample_rows(first.output_samples, None),
            },
        ],
        "neighbours": text.neighbour_rows(first),
        "pass": first.pass_,
    }


def _bars(histogram: dict[str, int] | None) -> list[tuple[str, int, int]]:
    """Bucket, count, and the bar's length in percent of the longest: logarithmic, so that one element shows."""
    counts = [(bucket, histogram[bucket]) for bucket in BUCKETS if histogram and histogram.get(bucket)]
    longest = max((count for _, count in counts), default=0)
    return [(bucket, count, round(100 * math.log2(1 + count) / math.log2(1 + longest))) for bucket, count in counts]


def _closeness(result: CaseResult) -> dict[str, Any]:
    """The largest error, and the histogram by kind."""
    found = result.closeness
    assert found is not None
    rows = [(bucket, [found.histogram[kind].get(bucket, 0) for kind in found.histogram]) for bucket in BUCKETS]
    sentence = text.closeness(result)
    return {
        "sentence": f"{sentence[0].upper()}{sentence[1:]}.",
        "kinds": list(found.histogram),
        "rows": [row for row in rows if any(row[1])],
    }


# Heatmaps. A cell is (text, shade, tooltip); shade 0 means that all agree, 1 to 4 how large the share is that does
# not, "x" that the report does not know.


class _Columns:
    """Steps, each a column, or, where there are too many, ranges of them."""

    def __init__(self, result: CaseResult) -> None:
        width = max(1, math.ceil(result.steps / MAX_COLUMNS))
        self.ranges = [range(first, min(first + width, result.steps)) for first in range(0, result.steps, width)]
        self.labels = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in self.ranges]
        steps = [int(step) for names in result.differing.values() for found in names.values() for step in found]
        # Keys were left out from this step on: what is not listed there may differ all the same.
        self._unsure = max(steps, default=0) if result.differing_left_out else result.steps
        self._agrees = "x" if result.verdict == Verdict.UNVERIFIED else "0"

    def cell(self, column: int, count: int, share: float, tooltip: str = "") -> tuple[str, str, str]:
        """What a column shows for so many that differ."""
        if self.ranges[column][-1] >= self._unsure:
            return f"{count}+" if count else "?", _shade(share) if count else "x", tooltip
        return str(count), _shade(share) if count else self._agrees, tooltip


def _shade(share: float) -> str:
    return str(max(1, min(4, math.ceil(4 * share))))


def _kind_heat(result: CaseResult) -> dict[str, Any] | None:
    """By kind: records compared, records that differ, and those by step."""
    if not any(result.compared.values()):
        return None
    columns = _Columns(result)
    is_known = bool(result.differing) or not any(result.mismatched.values())
    rows = []
    for kind, compared in result.compared.items():
        found = result.differing.get(kind, {})
        counts = [
            sum(len(ranks) for steps in found.values() for step, ranks in steps.items() if int(step) in steps_of)
            for steps_of in columns.ranges
        ]
        a_step = max(1, compared / result.steps)
        cells = [
            columns.cell(i, count, count / (a_step * len(columns.ranges[i]))) if compared else ("", "", "")
            for i, count in enumerate(counts)
        ]
        rows.append((kind, compared, result.mismatched[kind], cells if is_known else []))
    return {
        "steps": columns.labels if is_known else [],
        "rows": rows,
        "all_agree": result.verdict == Verdict.EQUAL,
        "total": sum(result.compared.values()),
        "left_out": result.differing_left_out,
    }


def _wanted_cells(result: CaseResult) -> int:
    """How large a heatmap of all differing tensors would be."""
    num_tensors = sum(map(len, result.differing.values()))
    return num_tensors * (len(_Columns(result).ranges) + ROW_CELLS) if num_tensors else 0


def _tensor_heat(result: CaseResult, max_cells: int) -> dict[str, Any] | None:
    """By tensor, in the order in which they first differ: on how many ranks it differs at each step, and on which."""
    if not result.differing:
        return None
    columns = _Columns(result)
    left = max(10, max_cells // (len(columns.ranges) + ROW_CELLS))
    groups, hidden = [], 0
    for kind in result.compared:
        found = result.differing.get(kind, {})
        shown = list(found.items())[:left]
        left, hidden = left - len(shown), hidden + len(found) - len(shown)
        if shown:
            groups.append((kind, [(name, *_tensor_row(steps, columns, result)) for name, steps in shown]))
    return {"steps": columns.labels, "groups": groups, "hidden": hidden, "world_size": result.world_size}


def _tensor_row(steps: dict[str, list[int]], columns: _Columns, result: CaseResult) -> tuple[Any, ...]:
    """The cells of a tensor's row, and all its ranks."""
    cells = []
    for column, steps_of in enumerate(columns.ranges):
        ranks = {rank for step in steps_of for rank in steps.get(str(step), ())}
        tooltip = f"rank {text.tell_ranks(ranks)}" if 0 < len(ranks) < result.world_size else ""
        cells.append(columns.cell(column, len(ranks), len(ranks) / result.world_size, tooltip))
    return cells, text.tell_ranks({rank for ranks in steps.values() for rank in ranks})


# The losses of rank 0: a sentence, a small chart, the numbers.

_WIDTH, _HEIGHT, _LEFT, _TOP = 320, 96, 6, 6


def _losses(result: CaseResult) -> dict[str, Any] | None:
    reference, candidate = result.losses["reference"], result.losses["candidate"]
    num_steps = max(len(reference), len(candidate))
    if not num_steps:
        return None
    rows = [(step, _at(reference, step), _at(candidate, step)) for step in range(num_steps)]
    apart = [step for step, left, right in rows if left != right]
    return {
        "sentence": _tell_losses(apart, reference, candidate, num_steps),
        "chart": _chart(reference, candidate, apart),
        "rows": [
            (step, f"{float.fromhex(left or right):.6f}", left or "missing", right or "missing", left == right)
            for step, left, right in rows[:MAX_LOSSES]
        ],
        "left_out": max(0, num_steps - MAX_LOSSES),
    }


def _at(losses: list[str], step: int) -> str:
    return losses[step] if step < len(losses) else ""


def _tell_losses(apart: list[int], reference: list[str], candidate: list[str], num_steps: int) -> str:
    if not apart:
        return f"The same bits on both sides at all {num_steps} steps."
    step = apart[0]
    left, right = (_at(losses, step) or "missing" for losses in (reference, candidate))
    steps = f"{len(apart)} of {num_steps} steps" if num_steps > 1 else "the only step"
    return f"They differ at {steps}, first at step {step}: {left} in the reference, {right} in the candidate."


def _chart(reference: list[str], candidate: list[str], apart: list[int]) -> dict[str, Any] | None:
    """Both sides as lines in a box of _WIDTH x _HEIGHT; what is not finite leaves a gap."""
    sides = [[float.fromhex(loss) for loss in losses] for losses in (reference, candidate)]
    finite = [value for side in sides for value in side if math.isfinite(value)]
    num_steps = max(map(len, sides))
    if num_steps < 2 or not finite:
        return None
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0

    def x(step: int) -> float:
        return round(_LEFT + (_WIDTH - 2 * _LEFT) * step / (num_steps - 1), 1)

    def y(value: float) -> float:
        return round(_TOP + (_HEIGHT - 2 * _TOP) * (high - value) / span, 1)

    stride = max(1, math.ceil(num_steps / MAX_POINTS))
    lines = [
        [" ".join(f"{x(step)},{y(value)}" for step, value in run) for run in _finite_runs(side, stride)]
        for side in sides
    ]
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "reference": lines[0],
        "candidate": lines[1],
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
        "last": num_steps - 1,
        "apart": x(apart[0]) if apart else None,
    }


def _finite_runs(losses: list[float], stride: int) -> Iterator[list[tuple[int, float]]]:
    """Unbroken runs of finite losses, every stride-th of them."""
    run: list[tuple[int, float]] = []
    for step in range(0, len(losses), stride):
        if math.isfinite(losses[step]):
            run.append((step, losses[step]))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _passes(passes: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """The passes in order: time with a bar, nodes before and after, what each was told and tells."""
    longest = max((entry["seconds"] for entry in passes), default=0) or 1
    shown = []
    for entry in passes:
        changed = [(name, before, after) for name, (before, after) in entry.get("changed", {}).items()]
        changed.sort(key=lambda row: -abs(row[2] - row[1]))
        details = {name: _values(entry[name], limit) for name in ("settings", "facts") if entry.get(name)}
        shown.append(
            {
                "name": entry["name"],
                "seconds": entry["seconds"],
                "bar": round(100 * max(0.0, entry["seconds"] / longest)),
                "before": entry["nodes_before"],
                "after": entry["nodes_after"],
                "changed": changed[:limit],
                "more_changed": max(0, len(changed) - limit),
                "details": details,
            }
        )
    return shown


def _logs(paths: list[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Logs by folder: a link and a short name each."""
    folders: dict[str, list[tuple[str, str]]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append((quote(path, errors="replace"), name.removesuffix(".log")))
    return list(folders.items())


def _printable(value: Any) -> Any:
    """A text in which every character that no page can show is spelled out; markup and numbers as they are."""
    if type(value) is not str:
        return value
    return _UNPRINTABLE.sub(lambda match: repr(match.group())[1:-1], value)
