"""The results of `bitproof faults`: tables for a terminal and for Markdown, and faults.json."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitproof.harness.errors import RecordingError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.records import SCHEMA, FaultOutcome, FaultsFound, Score, Verdict, share_in_words
from bitproof.harness.report.markdown_text import inline, rows_of
from bitproof.harness.validate import parse, read

MAX_BYTES = 64 * 2**20
MAX_EXPECTED = 4
"""The maximum number of places shown where a fault could be found."""

TOTAL = "all"
HEADERS = (
    "family",
    "faults",
    "killed",
    "equivalents",
    "flagged",
    "module and direction",
    "operator",
    "rank",
    "verified",
    "s",
)


def line_of(outcome: FaultOutcome) -> str:
    verdict = outcome.verdict.value if outcome.verdict else "-"
    words = [f"{outcome.fault} in {outcome.case}: {outcome.status}, {verdict} in {outcome.seconds:.1f} s"]
    if outcome.call is not None:
        words.append(f"blamed {blamed(outcome)}" + (", verified" if outcome.is_verified else ""))
    if outcome.holds:
        words.append(f"it holds {outcome.holds}")
    # None stands for a part that was not judged, so only False counts.
    if outcome.is_blamed_wrong:
        known = [*dict.fromkeys(outcome.expected)]
        more = f" or {len(known) - MAX_EXPECTED} others" if len(known) > MAX_EXPECTED else ""
        words.append(f"expected {' or '.join(known[:MAX_EXPECTED])}{more}")
    # The reason of a kill is shown where a search for its cause has failed.
    if outcome.reason and (outcome.status != "killed" or (outcome.verdict == Verdict.DIFFERENT and not outcome.call)):
        words.append(outcome.reason.splitlines()[0])
    return "; ".join(words)


def blamed(outcome: FaultOutcome) -> str:
    """Return the blamed call as text: `mm of layers.0.attn (backward, chunk 1) on rank 3`; "" if no call is blamed."""
    call = outcome.call
    if call is None:
        return ""
    module = "no module" if call.module is None else call.module or "the root"
    chunk = "" if call.chunk is None else f", chunk {call.chunk}"
    return f"{call.operator} of {module} ({call.direction}{chunk}) on rank {call.rank}"


def by_family(outcomes: Sequence[FaultOutcome]) -> list[tuple[str, ...]]:
    """Return the scores as rows of a table: a row per family of faults, and a last row for all."""
    families = dict.fromkeys(outcome.family for outcome in outcomes)
    groups = {family: [x for x in outcomes if x.family == family] for family in families} | {TOTAL: list(outcomes)}
    return [_row(name, Score.of(group)) for name, group in groups.items()]


def _row(name: str, score: Score) -> tuple[str, ...]:
    shares = (score.places, score.operators, score.ranks, score.verified)
    return (
        name,
        str(score.faults),
        share_in_words(score.killed, score.faults),
        str(score.equivalents),
        str(score.flagged),
        *(share_in_words(*share) for share in shares),
        f"{score.seconds:.0f}",
    )


def summary_lines(found: FaultsFound) -> Iterator[str]:
    """Yield the lines of a report: the table by family, the unexpected outcomes, and the summary of all."""
    from tabulate import tabulate

    yield from tabulate(by_family(found.outcomes), HEADERS, disable_numparse=True).splitlines()
    for title, chosen in _unexpected(found.outcomes).items():
        if chosen:
            yield ""
            yield f"{title}:"
            yield from (f"  {line_of(outcome)}" for outcome in chosen)
    yield ""
    if found.problem:
        yield f"ended early: {found.problem}"
    yield str(found.score)
    if found.cpu_seconds is not None:
        yield f"it took {found.cpu_seconds / 60:.1f} minutes of CPU"


def _unexpected(outcomes: Sequence[FaultOutcome]) -> dict[str, list[FaultOutcome]]:
    return {
        "survivors": [x for x in outcomes if x.status == "survived"],
        "false alarms": [x for x in outcomes if x.status == "flagged"],
        "not judged": [x for x in outcomes if x.status == "unjudged"],
        "struck nothing": [x for x in outcomes if x.status == "not struck"],
        "blamed elsewhere": [
            x for x in outcomes if x.status == "killed" and (x.is_blamed_wrong or x.kind_right is False)
        ],
    }


def render_json(found: FaultsFound) -> str:
    values = {
        "schema": SCHEMA,
        "headline": str(found.score),
        "problem": found.problem,
        "cpu_seconds": found.cpu_seconds,
        "calls": found.calls,
        "own_digest": found.own_digest,
        "families": [dict(zip(HEADERS, row, strict=True)) for row in by_family(found.outcomes)],
        "outcomes": [dataclasses.asdict(outcome) for outcome in found.outcomes],
    }
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def read_found(path: Path) -> FaultsFound:
    """Read the results in a faults.json. Raises RecordingError if the file is missing or damaged."""
    try:
        values = parse(read_plain(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordingError("a file of faults cannot be read", found=str(error), where=str(path)) from error
    return read(FaultsFound, values, "faults", RecordingError, damaged="is damaged", where=str(path))


def render_markdown(found: FaultsFound) -> str:
    lines = [inline(str(found.score)), "", *rows_of(HEADERS, by_family(found.outcomes)), ""]
    headers = ("fault", "what is wrong", "source", "case", "verdict", "blamed", "as expected")
    rows = [
        (
            x.fault,
            x.says,
            x.source,
            f"{x.case}, {x.ranks} ranks, {x.steps} steps",
            x.status + (f" ({', '.join(x.kinds)})" if x.kinds else f" ({x.verdict})" if x.verdict == "ERROR" else ""),
            blamed(x) or (f"holds {x.holds}" if x.holds else ""),
            _as_expected(x),
        )
        for x in found.outcomes
    ]
    return "\n".join([*lines, *rows_of(headers, rows), ""])


BEGIN, END = "<!-- bitproof faults: begin -->", "<!-- bitproof faults: end -->"
"""The lines of a page around its table of faults."""


def table_into(page: str, found: FaultsFound, environment: Mapping[str, Any], call: str) -> str | None:
    """Replace the text between the lines BEGIN and END of a page by a table of results, and return the page.

    Returns None if the page has no such lines. `call` is the command that measured the results.
    """
    # Anchored to whole lines, since a sentence of the page may mention BEGIN.
    place = re.search(f"^{BEGIN}$.*?^{END}$", page, re.MULTILINE | re.DOTALL)
    if place is None:
        return None
    before, after = page[: place.start()], page[place.end() :]
    machine = f"torch {environment.get('torch')}, {environment.get('cpu') or environment.get('machine') or 'a CPU'}"
    cost = "" if found.cpu_seconds is None else f", {found.cpu_seconds / 60:.1f} minutes of CPU"
    cost += f", in {found.calls} calls" if found.calls > 1 else ""
    lines = [
        f"`{call}`, on {inline(machine)}{cost}: {found.score}.",
        "",
        *rows_of(HEADERS, by_family(found.outcomes)),
    ]
    for title, chosen in _unexpected(found.outcomes).items():
        if chosen:
            lines += [
                "",
                f"{title[0].upper()}{title[1:]}:",
                "",
                *(f"- {inline(line_of(outcome))}" for outcome in chosen),
            ]
    return "\n".join([before + BEGIN, "", *lines, "", END + after])


def _as_expected(outcome: FaultOutcome) -> str:
    names = {"place": outcome.place_right, "operator": outcome.operator_right, "rank": outcome.rank_right}
    wrong = [name for name, right in names.items() if right is False]
    if outcome.status in ("survived", "flagged", "unjudged", "not struck"):
        return (outcome.reason or "no").splitlines()[0]
    return f"not {', '.join(wrong)}" if wrong else "yes"
