"""A check's finding about a case: data for programs, blocks for readers, and whether the check objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from bitproof.harness.records.divergence import BlamedCall
from bitproof.harness.validate import GROWING


@dataclass(frozen=True)
class Sentence:
    """A paragraph: `Sentence("peak memory: 512 MiB, reference 480 MiB")`."""

    __pydantic_config__ = GROWING

    text: str
    block: Literal["sentence"] = "sentence"


@dataclass(frozen=True)
class Table:
    """A table with a title above it; each row has as many cells as `headers`."""

    __pydantic_config__ = GROWING

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    block: Literal["table"] = "table"

    def __post_init__(self) -> None:
        """Convert each cell to text. Raises ValueError if a row has more or fewer cells than there are headers."""
        rows = tuple(tuple(map(str, row)) for row in self.rows)
        if any(len(row) != len(self.headers) for row in rows):
            raise ValueError(f"table {self.title!r} has a row without {len(self.headers)} cells")
        # The dataclass is frozen.
        object.__setattr__(self, "rows", rows)


@dataclass(frozen=True)
class Code:
    """Lines of text in a fixed-width font, with a title above them."""

    __pydantic_config__ = GROWING

    title: str
    text: str
    block: Literal["code"] = "code"


Block = Sentence | Table | Code


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A check's finding about a case.

    - `brief`: a clause beside the verdict, as in "EQUAL, sees 97.8% of 2,826 calls"; "" for none.
    - `objection`: why the case is not as expected (exit status 1), or "".
    - `unjudged`: why the check could not judge (exit status 3), or "".
    - `headline`: a sentence that every report prints first, or "".
    - `blocks`: the check's part of each report, in order.
    - `calls`: the operator calls to blame for an objection.
    - `data`: JSON values for programs, at `cases[i].checks.NAME.data` in report.json.
    """

    __pydantic_config__ = GROWING

    brief: str = ""
    objection: str = ""
    unjudged: str = ""
    headline: str = ""
    blocks: tuple[Block, ...] = ()
    calls: tuple[BlamedCall, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
