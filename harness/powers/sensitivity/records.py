"""Records of a case's sensitivity: the calls of a step whose error of 1 ULP the comparison detects."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING

Z = 1.959963984540054
"""95% of a normal distribution lie within this many standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits of a measurement: at most `sample` calls and `seconds` seconds. None means no limit."""

    sample: int | None = None
    seconds: float | None = 600.0


@dataclass(frozen=True, kw_only=True)
class SensitivityRow:
    """Counts of the calls in modules that match a pattern, such as `layers.*.moe`, in one direction.

    - `calls`: all calls.
    - `tried`: calls in which errors were made.
    - `seen`: calls whose error was noticed.
    - `at_once`: calls whose error was noticed at the first try: a single changed element in the first step.
    - `blind`: calls whose errors no comparison can notice (see `UnseenCall`).
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
    """A call whose errors of 1 ULP showed in no compared tensor.

    - `is_blind`: whether no comparison can see an error in this call, because even gross errors did not show or no call
      reads its output.
    - `reason`: where the errors disappeared.
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
    """Counts for a formula that differs from an operator only by rounding, such as `1 / sqrt(x)` for `rsqrt`.

    - `tried`: calls that were computed by the formula instead.
    - `same`: calls whose results had the same bits.
    - `seen`: calls with other bits that a compared tensor showed.
    - `lost`: calls with other bits that no compared tensor showed.
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
    """How many of a case's calls the comparison would notice if their results were wrong.

    - `steps`, `ranks`: number of measured steps, and number of ranks.
    - `rows`: counts by module and direction.
    - `unseen`: calls that were not noticed, including those that no comparison can notice.
    - `formulas`: results for formulas with other rounding.
    - `shown`: kind of the first compared tensor that showed an error -> number of such calls. The kind is "failure" if
      the error made a call fail.
    - `seconds`, `processes`: elapsed time, and number of measuring processes.
    - `reason`: why nothing was measured, or None.
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
        """Number of tried calls whose errors a comparison could see at all."""
        return self.total("tried") - self.total("blind")

    @property
    def share(self) -> float | None:
        """Share of seen errors among the calls whose errors a comparison can see; None if `can_see` is 0."""
        return self.total("seen") / self.can_see if self.can_see else None

    @property
    def is_sampled(self) -> bool:
        """Whether only a sample of the calls was tried."""
        return self.total("tried") < self.total("calls")

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% confidence interval of `share`, due to sampling; None if all calls or none were tried."""
        return wilson(self.total("seen"), self.can_see) if self.is_sampled and self.can_see else None


def wilson(hits: int, tries: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval for a share: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209."""
    share = hits / tries
    # Unlike the normal interval, it is valid for shares near 0 and 1, which are usual here.
    middle = (share + Z * Z / (2 * tries)) / (1 + Z * Z / tries)
    half = Z * math.sqrt(share * (1 - share) / tries + Z * Z / (4 * tries * tries)) / (1 + Z * Z / tries)
    return max(0.0, middle - half), min(1.0, middle + half)


def by_direction(rows: Iterable[SensitivityRow]) -> list[SensitivityRow]:
    """Return a row for each direction ("forward", ...), with the sums over all modules."""
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
