"""A system's speed and memory, measured while recording, without the recording's own time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from bitproof.harness.records.recording import Role
from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING, That

NOT_KNOWN = "not known"
Positive = Annotated[float, That("a number above zero", lambda number: number > 0, {"exclusiveMinimum": 0})]
AtLeastZero = Annotated[float, That("a number, zero or more", lambda number: number >= 0, {"minimum": 0})]


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """A system's throughput in its first run. Unknown values are None.

    - `step_seconds`: the median time of `steps` steps. A step takes as long as its slowest rank. The first step is a
      warm-up, and counts only if there is no other.
    - `spread_seconds`: the interquartile range of these times.
    - `tokens`: the number of tokens per step on all ranks.
    - `flops`: the number of operations in rank 0's first step, by torch's flop counter.
    - `peak_flops`, `peak_source`: the most operations per second that a device can do, and the source of this number.
    - `peak_mib`, `peak_of`: the largest memory of any rank, and whether this is memory of the rank's device or process.
    """

    __pydantic_config__ = GROWING

    steps: Count
    step_seconds: Positive
    spread_seconds: AtLeastZero
    tokens: Count | None = None
    flops: Count | None = None
    peak_flops: Positive | None = None
    peak_source: str | None = None
    peak_mib: AtLeastZero | None = None
    peak_of: Literal["device", "process"] | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: rank 0's operations per second divided by its device's peak; None if unknown."""
        if self.flops is None or self.peak_flops is None:
            return None
        return self.flops / self.step_seconds / self.peak_flops

    def table_rows(self) -> list[tuple[str, str]]:
        """Return all values as rows of a table; a row has a name and a value. An unknown value has the text "not
        known".
        """
        tokens, mfu = self.tokens_per_second, self.mfu
        peak = NOT_KNOWN if self.peak_flops is None else f"{_giga(self.peak_flops)}/s, {self.peak_source}"
        return [
            ("tokens a second", NOT_KNOWN if tokens is None else f"{tokens:,.0f}"),
            ("step, median", f"{self.step_seconds * 1000:,.1f} ms of {self.steps}"),
            ("spread between quartiles", f"{self.spread_seconds * 1000:,.1f} ms"),
            ("operations a step of rank 0", NOT_KNOWN if self.flops is None else _giga(self.flops)),
            ("MFU", NOT_KNOWN if mfu is None else f"{mfu:.1%}"),
            ("peak of a rank", peak),
            (
                "peak memory of a rank",
                NOT_KNOWN if self.peak_mib is None else f"{self.peak_mib:,.0f} MiB, {self.peak_of}",
            ),
        ]


def _giga(operations: float) -> str:
    return f"{operations / 1e9:,.3g} GFLOP" if operations < 1e12 else f"{operations / 1e12:,.3g} TFLOP"


def throughput_rows(found: Mapping[Role, Throughput]) -> list[tuple[str, ...]]:
    """Return the rows of a table with a column for each system: the name of a value, then the value in each system."""
    # All systems have the same rows in the same order, so the first system's names are everyone's.
    lines = [each.table_rows() for each in found.values()]
    return [(rows[0][0], *(value for _, value in rows)) for rows in zip(*lines, strict=True)]
