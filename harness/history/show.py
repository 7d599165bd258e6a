"""Trends as a table for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

from bitproof.harness.history.database import Night
from bitproof.harness.history.trends import DEFINITIONS, Trend, changes_of, commit_of, scores_of
from bitproof.harness.report.faults import headline

SLOW = 1.25


def print_trends(nights: Sequence[Night], trends: Sequence[Trend], stream: TextIO | None = None) -> None:
    """Print a row a case, then what changed of the machine, and what the columns mean."""
    from bitproof.harness.report.console import SafeConsole

    console = SafeConsole(stream)
    first, last = nights[0], nights[-1]
    nights_word = "night" if len(nights) == 1 else "nights"
    console.print(f"{len(nights)} {nights_word}, {first.time:%Y-%m-%d} to {last.time:%Y-%m-%d}")
    console.print(_table(trends))
    for line in filter(None, map(_tell_flaky, trends)):
        console.print(line, style="red")
    for night, score in scores_of(nights)[-1:]:
        console.print(f"faults, {night.time:%Y-%m-%d}: {headline(score)}")
    for change in changes_of(nights):
        console.print(str(change))
    for name, meaning in DEFINITIONS.items():
        console.print(f"{name}: {meaning}")


def _tell_flaky(trend: Trend) -> str | None:
    """Two results of one thing, and the runs whose folders have both recordings."""
    if trend.flaky is None:
        return None
    told = " and ".join(f"{night.outcomes[trend.name].verdict} in {night.run_id}" for night in trend.flaky)
    return f"FLAKY {trend.name}: {told}, of one commit, machine and versions"


def render_json(nights: Sequence[Night], trends: Sequence[Trend]) -> str:
    """Everything that is known, as JSON."""
    values = {
        "nights": [
            {
                "run_id": night.run_id,
                "exit_status": night.exit_status,
                "environment": night.environment,
                "faults": None if night.score is None else asdict(night.score),
            }
            for night in nights
        ],
        "cases": [trend.to_dict() for trend in trends],
        "changes": [
            {"run_id": change.night.run_id, "what": change.what, "before": change.before, "after": change.after}
            for change in changes_of(nights)
        ],
    }
    return json.dumps(values, indent=1)


def _table(trends: Sequence[Trend]) -> object:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for header in ("case", "last verdict", "expected", "since"):
        table.add_column(header, overflow="fold")
    for header in ("nights", "as expected", "flake rate", "unsure", "seconds", "median", "slower"):
        table.add_column(header, justify="right")
    is_timed = any(filter(None, (speed for trend in trends for speed in trend.speeds)))
    for header in ("step", "tokens/s", "MFU") if is_timed else ():
        table.add_column(header, justify="right")
    for trend in trends:
        last, slower = trend.last, trend.slower
        table.add_row(
            Text(trend.label),
            Text(last.verdict.value, style="green" if last.as_expected else "red"),
            Text(last.expected),
            Text(" ".join(filter(None, (f"{trend.since.time:%Y-%m-%d}", (commit_of(trend.since) or "")[:7])))),
            str(len(trend.outcomes)),
            f"{trend.as_expected:.0%}",
            Text(f"{trend.flake_rate:.0%}", style="red" if trend.flake_rate else ""),
            Text(f"{trend.unsure:.0%}", style="red" if trend.unsure else ""),
            f"{last.seconds:.1f}",
            "" if trend.median_seconds is None else f"{trend.median_seconds:.1f}",
            Text("" if slower is None else f"x {slower:.2f}", style="red" if slower and slower >= SLOW else ""),
            *(_speeds(trend) if is_timed else ()),
        )
    return table


def _speeds(trend: Trend) -> tuple[str, str, str]:
    """The candidate's last step time, tokens a second and MFU; empty for what is not known."""
    found = trend.last.throughput.get("candidate")
    if found is None:
        return "", "", ""
    tokens, mfu = found.tokens_per_second, found.mfu
    step = f"{found.step_seconds * 1000:,.1f} ms"
    return step, "" if tokens is None else f"{tokens:,.0f}", "" if mfu is None else f"{mfu:.1%}"
