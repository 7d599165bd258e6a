"""Present the findings of bitproof's own checks as titles and blocks, like the findings of users' checks.

Each form of a report prints these blocks. report.json has the same facts as fields of the case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bitproof.harness.records import BUCKETS, Block, CaseResult, Role, Sentence, Table, throughput_rows
from bitproof.harness.report import text

VALUES = ("what", "value")


def sections(result: CaseResult) -> Iterator[tuple[str, tuple[Block, ...]]]:
    """Yield a title and blocks for each kind of finding that the case has, such as "Closeness" or "Throughput"."""
    if result.closeness:
        yield (
            "Closeness",
            (
                _sentence(text.closeness(result)),
                histogram("Elements by ULPs, for each kind", result.closeness.histogram),
            ),
        )
    if result.layouts:
        rows = tuple(result.layouts.table())
        header = ("step", "kind", "tensor", "relative error", "bound", "used")
        yield "LayoutBounds", (_sentence(result.layouts.describe()), *([Table("", header, rows)] if rows else []))
    yield "Control", (Table("", ("side", "same system twice"), _verdicts(result.control)),)
    if result.stress:
        yield "Stress", (Table("", ("side", "same system under stress"), _verdicts(result.stress)),)
    if result.throughput:
        yield "Throughput", (Table("", ("figure", *result.throughput), tuple(throughput_rows(result.throughput))),)
    if result.partition:
        yield "Partition", (Table("", VALUES, tuple(result.partition.table_rows())),)
    if result.placed:
        parameters = ("parameter", "data", "tensor", "cost in us", "bytes of a rank")
        yield (
            "Placements",
            (Table("", VALUES, tuple(result.placed.table_rows())), Table("", parameters, tuple(result.placed.rows()))),
        )


def histogram(title: str, found: Mapping[str, Mapping[str, int]]) -> Table:
    """Return a table that counts elements by their distance in ULPs, with a column for each entry of `found`."""
    counts = [(bucket, [column.get(bucket, 0) for column in found.values()]) for bucket in BUCKETS]
    rows = tuple((bucket, *(f"{count:,}" for count in row)) for bucket, row in counts if any(row))
    return Table(title, ("ULPs", *found), rows)


def _verdicts(found: Mapping[Role, str | None]) -> tuple[tuple[str, str], ...]:
    return tuple((side, verdict or "not run") for side, verdict in found.items())


def _sentence(value: str) -> Sentence:
    return Sentence(f"{value[0].upper()}{value[1:]}.")
