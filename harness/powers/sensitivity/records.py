"""Records of a case's sensitivity: the calls of a step whose error of 1 ULP the comparison detects."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING

Z = 1.959963984540054
"""95% of a normal distribution are within this many standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The limits of a measurement: at most `sample` calls and `seconds` seconds. None means no limit."""

    sample: int | None = None
    seconds: float | None = 600.0


@dataclass(frozen=True, kw_only=True)
class SensitivityRow:
    """Counts of the calls in modules that match a pattern, such as `layers.*.moe`, and in one direction.

    `calls` counts all of them, `tried` those that were examined, and `seen` those whose error was noticed. `at_once`
    counts those whose error was noticed when the first element was changed, in the first step. `blind` counts those
    whose errors no comparison can notice (see `UnseenCall`).
    """

    __pydantic_config__ = GROWING

    module: str
    direction: str
    calls: Count = 0
    tried: Count = 0
    seen: Count = 0
    at_once: Count = 0
    blind: Count = 0


@dataclass(frozen=True, kw_only=True)
class UnseenCall:
    """A call whose errors of 1 ULP no compared tensor showed. `reason` states where the errors disappeared.

    `is_blind`: even gross errors in its whole output on all ranks did not show, or no call reads its output. So no
    comparison can see an error in this call.
    """

    __pydantic_config__ = GROWING

    operator: str
    module: str
    direction: str
    chunk: int | None = None
    node: str = ""
    is_blind: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class FormulaRow:
    """Counts for a formula that differs from an operator by rounding only, such as `1 / sqrt(x)` for `rsqrt`.

    `tried` counts the calls that were computed by the formula instead. Their results had the same bits (`same`), other
    bits that a compared tensor showed (`seen`), or other bits that none showed (`lost`).
    """

    __pydantic_config__ = GROWING

    operator: str
    formula: str
    tried: Count = 0
    seen: Count = 0
    same: Count = 0
    lost: Count = 0


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How many of a case's calls the comparison would notice if wrong. If nothing was measured, `reason` states why.

    `steps` is the number of measured steps. `is_sampled`: not all calls were tried; then `interval` is Wilson's 95%
    interval for the share of noticed calls. `unseen` lists the calls that were not noticed, including those that cannot
    be; `formulas` has the results for formulas with other rounding. `shown` counts noticed calls by the kind of the
    first compared tensor that differs, or "failure" if an error made a call fail. `seconds` is the elapsed time, with
    `processes` processes.
    """

    __pydantic_config__ = GROWING

    steps: Count = 0
    ranks: Count = 0
    rows: list[SensitivityRow] = field(default_factory=list)
    unseen: list[UnseenCall] = field(default_factory=list)
    formulas: list[FormulaRow] = field(default_factory=list)
    shown: dict[str, Count] = field(default_factory=dict)
    seconds: float | None = None
    processes: Count = 1
    reason: str | None = None

    def total(self, name: Literal["calls", "tried", "seen", "at_once", "blind"]) -> int:
        """Return the sum of the column `name` over all rows."""
        return sum(getattr(row, name) for row in self.rows)

    @property
    def can_see(self) -> int:
        """The number of tried calls whose errors a comparison could see at all."""
        return self.total("tried") - self.total("blind")

    @property
    def share(self) -> float | None:
        """The share of `can_see` calls whose errors were seen; None if there are none."""
        return self.total("seen") / self.can_see if self.can_see else None

    @property
    def is_sampled(self) -> bool:
        """Whether only a sample of the calls was tried."""
        return self.total("tried") < self.total("calls")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% confidence interval of `share`, due to sampling; None if all calls or none were tried."""
        return wilson(self.total("seen"), self.can_see) if self.is_sampled and self.can_see else None


def wilson(hits: int, tries: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval for a share: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209."""
    share = hits / tries
    # Unlike the normal interval, it is valid for shares near 0 and 1, which are usual here.
    middle = (share + Z * Z / (2 * tries)) / (1 + Z * Z / tries)
    half = Z * math.sqrt(share * (1 - share) / tries + Z * Z / (4 * tries * tries)) / (1 + Z * Z / tries)
    return max(0.0, middle - half), min(1.0, middle + half)


def by_direction(rows: Iterable[SensitivityRow]) -> list[SensitivityRow]:
    """Return a row per direction ("forward", ...), with the sums over all modules."""
    found: dict[str, list[SensitivityRow]] = {}
    for row in rows:
        found.setdefault(row.direction, []).append(row)
    return [
        SensitivityRow(
            module="all",
            direction=direction,
            **{name: sum(getattr(row, name) for row in own) for name in ("calls", "tried", "seen", "at_once", "blind")},
        )
        for direction, own in found.items()
    ]
