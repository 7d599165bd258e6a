"""The history as a picture: a row a case, a column a night, and the line of seconds beside it. One file, no script."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from bitproof.harness.errors import UsageError
from bitproof.harness.history.database import Night, Outcome
from bitproof.harness.history.show import SLOW
from bitproof.harness.history.trends import DEFINITIONS, Change, Trend, changes_of, commit_of
from bitproof.harness.printable import printable
from bitproof.harness.records import Verdict
from bitproof.harness.records.throughput import NOT_KNOWN
from bitproof.harness.report.write import write_atomically

# Pale where all is as expected, so that what is not stands out; a letter, as colours alone do not reach everybody.
GOOD, GOOD_CLOSE, TEXT, SOFT = "#cdebd3", "#cfe8ef", "#22303c", "#6b7885"
BAD = {
    Verdict.EQUAL: "#c77700",
    Verdict.CLOSE: "#1d7f99",
    Verdict.DIFFERENT: "#d9480f",
    Verdict.NONDETERMINISTIC: "#7b3fb5",
    Verdict.UNVERIFIED: "#66707a",
    Verdict.ERROR: "#b3142b",
}
LETTERS = {verdict: verdict.value[0] for verdict in Verdict} | {Verdict.ERROR: "X"}
STATUS_COLORS = {0: GOOD, 1: BAD[Verdict.DIFFERENT], 3: BAD[Verdict.ERROR]}

MARGIN, ROW, CELL, HEAD, TITLE, LINE = 16, 22, 20, 116, 34, 120
STEP = 88 + LINE + 136
FIGURES = {
    "flake rate": 0,
    "seconds": 88,
    "last": 88 + LINE + 12,
    "slower": 88 + LINE + 70,
    "candidate's step": STEP,
    "ms": STEP + LINE + 12,
    "tokens/s": STEP + LINE + 84,
}
CHAR = 7.3  # the width of a letter of 12 px monospace, rounded up


def write_plot(path: Path, nights: Sequence[Night], trends: Sequence[Trend]) -> None:
    """Write the picture: as SVG, or within a page of HTML. Raises UsageError for another kind of file."""
    render = {".svg": render_svg, ".html": render_html}.get(path.suffix)
    if render is None:
        raise UsageError("a plot is a picture or a page", expected="a file named .svg or .html", found=str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, render(nights, trends))
    except OSError as error:
        raise UsageError("the plot cannot be written", found=f"{path}: {error.strerror or error}") from error


def render_html(nights: Sequence[Night], trends: Sequence[Trend]) -> str:
    """A page that needs no network and runs nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>bitproof history</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"></head>\n'
        f'<body style="margin: 0; background: white">\n{render_svg(nights, trends)}</body></html>\n'
    )


def render_svg(nights: Sequence[Night], trends: Sequence[Trend]) -> str:
    """The picture alone."""
    left = MARGIN + max(len("exit status"), *(len(trend.label) for trend in trends)) * CHAR + 12
    right = left + len(nights) * CELL + 16
    top = TITLE + HEAD
    changes = _by_night(nights)
    notes = [f"{number}  {change}" for number, found in enumerate(changes.values(), 1) for change in found]
    notes += [f"{name}: {DEFINITIONS[name]}" for name in ("flake rate", "slower")]
    table_bottom = top + (len(trends) + 1) * ROW
    legend = table_bottom + 26
    height = legend + 30 + 17 * len(notes)
    width = max(right + FIGURES["tokens/s"] + 90, 2 * MARGIN + CHAR * max(map(len, notes)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, '
        f'monospace" font-size="12" fill="{TEXT}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        _text(MARGIN, 24, _title(nights), size=15, weight="bold"),
        *_heads(nights, left, right, top),
        *_statuses(nights, left, top),
    ]
    for index, trend in enumerate(trends):
        parts += _row(trend, left, right, top + (index + 1) * ROW)
    parts += _change_lines(nights, changes, left, top, table_bottom)
    parts += _legend(legend)
    for index, line in enumerate(notes):
        parts.append(_text(MARGIN, legend + 34 + 17 * index, line, fill=SOFT))
    return "\n".join([*parts, "</svg>\n"])


def _title(nights: Sequence[Night]) -> str:
    days = f"{nights[0].time:%Y-%m-%d} to {nights[-1].time:%Y-%m-%d}"
    return f"bitproof history: {len(nights)} night{'s' if len(nights) != 1 else ''}, {days}"


def _heads(nights: Sequence[Night], left: float, right: float, top: float) -> Iterator[str]:
    """Dates and commits above the columns, upright so that each fits its column, and the names of the figures."""
    for index, night in enumerate(nights):
        x, y = left + index * CELL + CELL / 2 + 4, top - 6
        yield f'<g transform="rotate(-90 {x:.1f} {y:.1f})">{_text(x, y, _column(night), fill=SOFT)}</g>'
    for name, x in FIGURES.items():
        yield _text(right + x, top - 6, name, fill=SOFT)


def _statuses(nights: Sequence[Night], left: float, top: float) -> Iterator[str]:
    yield _text(MARGIN, top + 15, "exit status", fill=SOFT)
    for index, night in enumerate(nights):
        status = night.exit_status
        color = STATUS_COLORS.get(status, BAD[Verdict.ERROR])
        yield _cell(
            left + index * CELL, top, color, str(status), status == 0, f"{_moment(night)}: exit status {status}"
        )


def _row(trend: Trend, left: float, right: float, top: float) -> Iterator[str]:
    yield _text(MARGIN, top + 15, trend.label)
    for index, (night, outcome) in enumerate(zip(trend.nights, trend.by_night, strict=True)):
        if outcome is not None:
            yield _outcome_cell(left + index * CELL, top, trend.label, night, outcome)
    flakes = f"{trend.flake_rate:.0%}"
    yield _text(right + FIGURES["flake rate"], top + 15, flakes, fill=BAD[Verdict.ERROR] if trend.flake_rate else SOFT)
    yield from _line(
        [None if outcome is None else outcome.seconds for outcome in trend.by_night], right + FIGURES["seconds"], top
    )
    yield _text(right + FIGURES["last"], top + 15, f"{trend.last.seconds:.1f}")
    if trend.slower is not None:
        is_slow = trend.slower >= SLOW
        fill, weight = (BAD[Verdict.ERROR], "bold") if is_slow else (SOFT, "normal")
        yield _text(right + FIGURES["slower"], top + 15, f"x {trend.slower:.2f}", fill=fill, weight=weight)
    yield from _line([None if speed is None else speed.step_seconds for speed in trend.speeds], right + STEP, top)
    if (last := trend.last.throughput.get("candidate")) is not None:
        yield _text(right + FIGURES["ms"], top + 15, f"{last.step_seconds * 1000:,.1f}")
        tokens = last.tokens_per_second
        yield _text(right + FIGURES["tokens/s"], top + 15, NOT_KNOWN if tokens is None else f"{tokens:,.0f}", fill=SOFT)


def _outcome_cell(x: float, top: float, name: str, night: Night, outcome: Outcome) -> str:
    verdict, is_good = outcome.verdict, outcome.as_expected
    good = GOOD_CLOSE if verdict == Verdict.CLOSE else GOOD
    lines = [f"{name}, {_moment(night)}", f"{verdict.value}, expected {outcome.expected}", f"{outcome.seconds:.1f} s"]
    lines += [outcome.first_divergence] if outcome.first_divergence else []
    return _cell(x, top, good if is_good else BAD[verdict], LETTERS[verdict], is_good, "\n".join(lines))


def _cell(x: float, top: float, color: str, letter: str, is_good: bool, about: str) -> str:
    size = CELL - 3
    box = f'<rect x="{x:.1f}" y="{top + 2:.1f}" width="{size}" height="{size}" rx="3" fill="{color}"/>'
    fill, weight = ("#3d6b4a", "normal") if is_good else ("white", "bold")
    label = _text(x + size / 2, top + 15, letter, size=11, fill=fill, weight=weight, anchor="middle")
    return f"<g><title>{_escape(about)}</title>{box}{label}</g>"


def _line(values: Sequence[float | None], left: float, top: float) -> Iterator[str]:
    """Seconds over the nights, from zero up, with a dot at the last; nothing where none are known."""
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    step = LINE / max(len(values) - 1, 1)
    points = [
        (left + index * step, top + ROW - 4 - (ROW - 8) * value / most)
        for index, value in enumerate(values)
        if value is not None
    ]
    if not points:
        return
    base = top + ROW - 4
    yield f'<path d="M{left:.1f} {base:.1f}h{LINE}" stroke="#dfe4e8" stroke-width="1"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="#3c6e9f" stroke-width="1.5" stroke-linejoin="round"/>'
    yield f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="2.5" fill="#3c6e9f"/>'


def _by_night(nights: Sequence[Night]) -> dict[str, list[Change]]:
    changes: dict[str, list[Change]] = {}
    for change in changes_of(nights):
        changes.setdefault(change.night.run_id, []).append(change)
    return changes


def _change_lines(
    nights: Sequence[Night], changes: dict[str, list[Change]], left: float, top: float, bottom: float
) -> Iterator[str]:
    """A dashed line before the first night on another machine or version, numbered as the notes below."""
    columns = {night.run_id: index for index, night in enumerate(nights)}
    for number, run_id in enumerate(changes, 1):
        x = left + columns[run_id] * CELL - 1.5
        yield f'<path d="M{x:.1f} {top - 2}V{bottom}" stroke="{TEXT}" stroke-dasharray="3 3"/>'
        yield _text(x, bottom + 12, str(number), size=11, anchor="middle")


def _legend(top: float) -> Iterator[str]:
    x: float = MARGIN
    for verdict in Verdict:
        yield _cell(x, top - 8, BAD[verdict], LETTERS[verdict], False, verdict.value)
        yield _text(x + CELL, top + 7, verdict.value.lower(), fill=SOFT)
        x += CELL + (len(verdict.value) + 2) * CHAR
    yield _cell(x, top - 8, GOOD, "E", True, "as expected")
    yield _text(x + CELL, top + 7, "pale: as expected", fill=SOFT)


def _column(night: Night) -> str:
    """What stands above a night's column: `01-31 c0ffee1`."""
    return " ".join(filter(None, (f"{night.time:%m-%d}", (commit_of(night) or "")[:7])))


def _moment(night: Night) -> str:
    commit = night.environment.get("commit")
    return f"{night.time:%Y-%m-%d %H:%M} UTC" + (f", commit {commit:.12}" if isinstance(commit, str) else "")


def _text(
    x: float, y: float, content: str, *, size: int = 12, fill: str = TEXT, weight: str = "normal", anchor: str = "start"
) -> str:
    style = "" if weight == "normal" else f' font-weight="{weight}"'
    style += "" if anchor == "start" else f' text-anchor="{anchor}"'
    style += "" if size == 12 else f' font-size="{size}"'
    style += "" if fill == TEXT else f' fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{style} xml:space="preserve">{_escape(content)}</text>'


def _escape(content: str) -> str:
    return html.escape(printable(content))
