"""Define the columns of a table of digests, and check the values in each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bitproof.harness.capture.columns import column, digests_of, values_of
from bitproof.harness.case import KINDS
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Manifest
from bitproof.harness.records.layout import is_box

COLUMNS = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("digest", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("value", pa.string()),
        pa.field("content", pa.string()),
        pa.field("placements", pa.string()),
        pa.field("box", pa.string()),
        pa.field("cells", pa.string()),
    ]
)


OPTIONAL = ("value", "content", "placements", "box", "cells")


_HEX_FLOAT = r"^(nan|-?inf|-?0x[01]\.[0-9a-f]+p[+-][0-9]{1,4})$"


_MAX_NAME = 1000


def check_values(path: Path, table: pa.Table, manifest: Manifest) -> None:
    """Raise RecordingError if a value in the table is out of its range. Code that reads the table later relies on
    this.
    """
    is_loss = pc.equal(table["kind"], _scalar("loss", pa.string()))
    checks = {
        f"step in 0..{manifest.steps - 1}": _within(table["step"], manifest.steps),
        f"rank in 0..{manifest.world_size - 1}": _within(table["rank"], manifest.world_size),
        f"kind among {', '.join(KINDS)}": _are_among(table["kind"], KINDS),
        # Names and dtypes repeat in many rows, so each distinct text is checked once.
        f"name of 1 to {_MAX_NAME} printable characters": _are_printable(table["name"].unique()),
        # A name may become a part of a path.
        "name that leads nowhere else": pc.invert(_matches(table["name"].unique(), r"(^|/)\.\.(/|$)")),
        "dtype by its name": _matches(table["dtype"].unique(), r"^[a-z][a-z0-9_]{0,40}$"),
        "sizes that are not negative": pc.greater_equal(pc.list_flatten(table["shape"]), _scalar(0, pa.int64())),
        "a value for each loss and for nothing else": pc.equal(is_loss, pc.is_valid(table["value"])),
        "content absent, nan, inf or zero": _are_among(table["content"].drop_null(), ("nan", "inf", "zero")),
        f"placements absent, or of 1 to {_MAX_NAME} printable characters": _are_printable(
            table["placements"].drop_null().unique()
        ),
        "cells absent, or digests of 32 hexadecimal digits each": _matches(
            table["cells"].drop_null(), r"^([0-9a-f]{32})*$"
        ),
        "losses as hexadecimal floats": _matches(table["value"].drop_null(), _HEX_FLOAT),
    }
    try:
        digests_of(table["digest"])
    except ValueError as error:
        raise RecordingError(
            f"{path} holds a value out of range", expected="digest of 32 hexadecimal digits"
        ) from error
    for expected, passed in checks.items():
        # A mask has a null where the column has one, and no rule is met there.
        if passed.null_count > 0 or (len(passed) and not pc.all(passed).as_py()):
            raise RecordingError(f"{path} holds a value out of range", expected=expected)
    if not all(is_box(text) for text in set(values_of(table["box"].drop_null()))):
        raise RecordingError(f"{path} holds a value out of range", expected="box absent, or a part of a tensor")
    if any(
        column.null_count for name, column in zip(COLUMNS.names, table.columns, strict=True) if name not in OPTIONAL
    ):
        raise RecordingError(f"{path} holds a null", expected=f"nulls nowhere but in {' and '.join(OPTIONAL)}")


def _within(column: pa.ChunkedArray, end: int) -> Any:
    kind = column.type
    return pc.and_(pc.greater_equal(column, _scalar(0, kind)), pc.less(column, _scalar(end, kind)))


def _are_among(texts: pa.ChunkedArray, known: Sequence[str]) -> Any:
    return pc.is_in(texts, value_set=column(known, pa.field("", pa.string())))


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    # Arrow's own conversion would import pandas first.
    return column([value], pa.field("", kind))[0]


def _matches(column: pa.ChunkedArray, pattern: str) -> Any:
    return pc.match_substring_regex(column, pattern)


def _are_printable(column: pa.ChunkedArray) -> Any:
    sizes = pc.utf8_length(column)
    fits = pc.and_(pc.greater(sizes, _scalar(0, sizes.type)), pc.less_equal(sizes, _scalar(_MAX_NAME, sizes.type)))
    # Letters of any script are printable; control characters and line separators are not.
    return pc.and_(fits, pc.invert(_matches(column, r"[\p{C}\p{Zl}\p{Zp}]")))
