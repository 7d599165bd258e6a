"""Write report.html: the whole report as a single page, without network requests and scripts.

The page's size is limited: the page states what it omits, and report.json has everything. Every value is made printable
and is escaped by jinja2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bitproof.harness.case import Case
from bitproof.harness.errors import cut
from bitproof.harness.printable import printable
from bitproof.harness.records import (
    BUCKETS,
    ROLES,
    Block,
    CaseResult,
    Divergence,
    PassReport,
    Report,
)
from bitproof.harness.report import blocks, causes, text
from bitproof.harness.report.case_row import CaseRow, row_of
from bitproof.harness.report.html import heatmaps
from bitproof.harness.report.html.heatmaps import KindHeat, TensorHeat
from bitproof.harness.report.html.losses import LossBlock, losses
from bitproof.harness.report.html.pictures import RankLanes, lanes_of
from bitproof.harness.report.markdown import status_text
from bitproof.harness.report.sections import sections

if TYPE_CHECKING:
    import jinja2

TEMPLATE = Path(__file__).with_name("report.html.jinja")

# Limits of the page, shared by its cases.
MAX_CELLS = 6_000
MAX_PASS_ROWS = 2_500
MAX_ERRORS_CHARS = 100_000
MAX_ERROR_CHARS = 16_000
MAX_VALUES = 12
MAX_VALUE_CHARS = 300
MAX_REASON_CHARS = 2_000


@dataclasses.dataclass(frozen=True)
class Limits:
    """A case's share of the page's limits: heatmap cells, characters of its error, and rows in the tables of each
    pass.
    """

    cells: int
    error_chars: int
    pass_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifferenceBlock:
    """How a tensor differs between the two systems.

    - `of`: names the tensor, such as "The blamed call's output".
    - `extent`: the size of the difference in words.
    - `bars`: the bars of a histogram, each with the bucket, its count, and its length in percent.
    - `samples`: the first few differing elements.
    """

    of: str
    extent: str
    bars: list[tuple[str, int, int]]
    samples: list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceBlock:
    """The tensor that differs first, and the blamed call.

    `apart` has two entries: how the tensor differs, and how the blamed call's output differs.
    """

    where: str
    sides: tuple[str, ...]
    types: str
    label: str
    blame: str | None
    evidence: list[tuple[str, str]]
    ranks: str
    apart: list[DifferenceBlock]
    picture: RankLanes | None
    lanes: list[str]
    chain: list[tuple[str, ...]]
    pass_: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassBlock:
    """A pass on the page.

    - `bar`: the pass's time in percent of the slowest pass.
    - `before`, `after`: the numbers of nodes.
    """

    name: str
    seconds: float
    bar: int
    before: int
    after: int
    changed: list[tuple[str, int, int]]
    more_changed: int
    details: dict[str, list[tuple[str, str]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseBlock(CaseRow):
    """The facts about a case that the page shows."""

    replay: str
    about: list[tuple[str, str]]
    checks: list[tuple[str, list[str], list[Block]]]
    sections: list[tuple[str, list[str], list[Block]]]
    remarks: list[str]
    error: str
    divergence: DivergenceBlock | None
    kinds: KindHeat | None
    tensors: TensorHeat | None
    losses: LossBlock | None
    passes: list[PassBlock]
    seconds_of: list[tuple[str, float]]
    logs: list[tuple[str, list[tuple[str, str]]]]


def render(report: Report) -> str:
    """Return the page as HTML. Unexpected cases are first, and expanded."""
    # `sorted` is stable: within both groups cases keep the order of the run.
    results = sorted(report.cases, key=lambda result: result.as_expected)
    # A page of hundreds of cases must stay small, so the limits are shared: a small case leaves its share to others.
    num_passes = sum(len(result.passes) for result in results)
    limits = Limits(
        cells=fair_share(map(heatmaps.wanted_cells, results), MAX_CELLS),
        error_chars=fair_share((min(len(result.error or ""), MAX_ERROR_CHARS) for result in results), MAX_ERRORS_CHARS),
        pass_rows=max(3, min(MAX_VALUES, MAX_PASS_ROWS // max(1, num_passes))),
    )
    wrong, more = causes.explained(report)
    page: str = template().render(
        report=report,
        status=status_text(report),
        tally=text.tally(report),
        remarks=text.remarks(report),
        loudest=text.headlines(report),
        causes=[{"row": row_of(result), "lines": causes.lines_of(result)} for result in wrong],
        more_causes=more,
        rows=[row_of(result) for result in report.cases],
        cases=[_case(report, result, limits) for result in results],
        not_run=[(name, text.shorten(reason, MAX_REASON_CHARS)) for name, reason in report.not_run.items()],
        environment=_values(report.environment, 100),
    )
    return page


@functools.cache
def template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        # StrictUndefined: a misspelled name in the template raises instead of printing nothing.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def fair_share(wanted: Iterable[int], total: int) -> int:
    """Return the largest limit such that the wanted sizes, each cut to the limit, have a sum of at most `total`.

    For example, with a total of 10 the sizes [1, 4, 9] are limited to 5 each.
    """
    waiting = sorted(wanted)
    # In ascending order: a size below an equal share of the rest leaves more to each larger size.
    for number, wants in enumerate(waiting):
        share = total // (len(waiting) - number)
        if wants > share:
            return share
        total -= wants
    return max(waiting, default=0)


def _case(report: Report, result: CaseResult, limits: Limits) -> CaseBlock:
    case, parallelism, first = result.case, result.case.parallelism, result.first_divergence
    chunking = case.chunking and f"{case.chunking.modules} in two along {case.chunking.dim}"
    # A user's systems may ignore the case's model and parallelism, so only the settings that the case states are shown.
    about = [
        ("compared", f"{case.candidate} against {case.reference}"),
        *(_stated(case) if case.is_foreign else [("model", f"{case.model.family} {case.model.flavor}")]),
        *([] if case.is_foreign else [("split", chunking or "nothing")]),
        ("run", result.where),
        *([] if case.is_foreign else [("parallel", f"ep {parallelism.ep}, tp {parallelism.tp}")]),
    ]
    if memory := {side: f"{mib:,.1f} MiB" for side, mib in result.memory.items() if mib is not None}:
        about.append(("peak memory", ", ".join(f"{side} {value}" for side, value in memory.items())))
    return CaseBlock(
        **vars(row_of(result)),
        replay=text.replay_command(report, result),
        about=about,
        checks=[
            (f"Check {name}", blocks.reasons_of(found), [*map(blocks.shortened, found.blocks)])
            for name, found in result.checks.items()
        ],
        sections=[(title, [], [*map(blocks.shortened, found)]) for title, found in sections(result)],
        remarks=[cut(remark, MAX_ERROR_CHARS) for remark in result.remarks],
        error=text.shorten(result.error or "", limits.error_chars),
        divergence=_divergence(result, first) if first else None,
        kinds=heatmaps.by_kind(result),
        tensors=heatmaps.by_tensor(result, limits.cells),
        losses=losses(result),
        passes=_passes(result.passes, limits.pass_rows),
        seconds_of=[(name, value) for name, value in text.flatten_seconds(result) if not name.startswith("passes.")],
        logs=_logs(result.logs),
    )


def _stated(case: Case) -> list[tuple[str, str]]:
    settings = ("model", "parallelism", "batch", "precision", "optimizer")
    stated = case.stated()
    # `ep` 1 means no expert parallelism, and is not worth a mention.
    shown = dict(text.leaves({name: stated[name] for name in settings if stated.get(name)}))
    if shown.get("parallelism.ep") == "1":
        del shown["parallelism.ep"]
    return [("the case states", ", ".join(map(" ".join, shown.items())))]


def _values(value: Any, limit: int = MAX_VALUES) -> list[tuple[str, str]]:
    rows = [(path, text.shorten(leaf, MAX_VALUE_CHARS, "report.json has them")) for path, leaf in text.leaves(value)]
    return [*rows[:limit], *([("...", f"{len(rows) - limit} more, in report.json")] if len(rows) > limit else [])]


def _divergence(result: CaseResult, first: Divergence) -> DivergenceBlock:
    tensor, call = first.tensor, first.call
    # If a system differs from itself, its two runs are the sides.
    types = [tensor.reference_type, tensor.candidate_type]
    ranks = (call and call.ranks) or ""
    sides = ("first run", "second run") if first.between else ROLES
    parts = (("The tensor", tensor), ("The blamed call's output", call.output if call else None))
    return DivergenceBlock(
        where=text.locate(first, result.case),
        sides=sides,
        types=(types[0] or "") if types[0] == types[1] else ", ".join(map("{}: {}".format, sides, types)),
        label=text.blame_label(first).capitalize(),
        blame=text.blame(first),
        evidence=text.evidence(call),
        ranks=ranks if "," in ranks else "",
        apart=[
            DifferenceBlock(
                of=what,
                extent=text.extent(difference),
                bars=_bars(difference.histogram if difference else None),
                samples=text.sample_rows(difference),
            )
            for what, difference in parts
        ],
        picture=lanes_of(call, result.world_size),
        lanes=sorted({row[0] for row in text.chain_rows(call)}, key=int),
        chain=text.chain_rows(call),
        pass_=first.pass_,
    )


def _bars(histogram: dict[str, int] | None) -> list[tuple[str, int, int]]:
    # Logarithmic, so that a few elements among millions are visible. `1 +`, as the logarithm of 1 has no length.
    counts = [(bucket, histogram[bucket]) for bucket in BUCKETS if histogram and histogram.get(bucket)]
    longest = max((count for _, count in counts), default=0)
    return [(bucket, count, round(100 * math.log2(1 + count) / math.log2(1 + longest))) for bucket, count in counts]


def _passes(passes: list[PassReport], limit: int) -> list[PassBlock]:
    # `or 1`: passes that took no measurable time have no bar, and must not divide by zero.
    longest = max((entry.seconds for entry in passes), default=0) or 1
    shown = []
    for entry in passes:
        changed = [(name, before, after) for name, (before, after) in entry.changed.items()]
        changed.sort(key=lambda row: -abs(row[2] - row[1]))
        tables = {"settings": entry.settings, "facts": entry.facts}
        details = {name: _values(values, limit) for name, values in tables.items() if values}
        shown.append(
            PassBlock(
                name=entry.name,
                seconds=entry.seconds,
                bar=round(100 * max(0.0, entry.seconds / longest)),
                before=entry.nodes_before,
                after=entry.nodes_after,
                changed=changed[:limit],
                more_changed=max(0, len(changed) - limit),
                details=details,
            )
        )
    return shown


def _logs(paths: list[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    folders: dict[str, list[tuple[str, str]]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append((quote(path, errors="replace"), name.removesuffix(".log")))
    return list(folders.items())


def _shown(value: Any) -> Any:
    # `type` instead of `isinstance`: markup is a subclass of `str`.
    # Text is made printable before jinja2 escapes it; markup and numbers stay as they are.
    return printable(value) if type(value) is str else value
