"""The result of comparing two systems with different layouts of tensors.

Some tensors must be equal. Others may differ by rounding, because the two layouts group the terms of their sums
differently: their errors are compared with bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bitproof.harness.case import Kind
from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING

MAX_ROWS = 20
FEWEST_SAMPLES, MOST_SAMPLES = 3, 12
"""The number of runs with reordered sums: FEWEST_SAMPLES at first, and up to MOST_SAMPLES if a tensor is then `near`
its bound."""
Phase = Literal["forward", "backward", "clip", "update"]
"""The phases of a step, in order; "clip" is everything between backward and the optimizer."""


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """A tensor that differs between the two systems at a step, its relative error and its bound.

    - `bound`: None if the tensor had to be equal, or if `apart` is True.
    - `error`: None if it is not finite.
    - `rank`: the first rank of the candidate on which the tensor differs.
    - `apart`: whether, within one system, several ranks have the same part of the tensor with different bits.
    """

    __pydantic_config__ = GROWING

    step: Count
    kind: Kind
    name: str
    error: float | None
    bound: float | None
    rank: Count = 0
    apart: bool = False

    @property
    def used(self) -> float | None:
        """The error as a fraction of its bound; None without a finite error or a bound."""
        return self.error / self.bound if self.bound and self.error is not None else None

    @property
    def is_beyond(self) -> bool:
        """Whether the error is larger than reordered sums can explain, or several ranks of one system differ
        (`apart`).
        """
        # `not <=` and not `>`: a NaN is beyond any bound.
        return self.apart or self.bound is None or self.error is None or not self.error <= self.bound


@dataclass(frozen=True, kw_only=True)
class InFloat64:
    """The result for the same two systems in float64, where rounding errors are 2^29 times smaller than in float32.

    - `beyond`: the number of tensors that still differ, by far more than reordered sums change them.
    - `rows`: the tensors that `beyond` counts, in the order of computation. If there are none, the tensors that used
      most of their bound.
    - `narrow`: the first call, such as "aten.mul.Tensor (train.py:12)", that read a tensor of a narrower float dtype
      which no call of torch had computed. A difference may then be rounding. None if there was no such call.
    - `less_accurate`: the candidate's rounding error divided by the reference's. None if the candidate's error is no
      larger than reordered sums explain.
    - `failed`: why there are no runs in float64.
    """

    __pydantic_config__ = GROWING

    beyond: Count = 0
    narrow: str | None = None
    less_accurate: float | None = None
    failed: str | None = None
    rows: list[LayoutRow] = field(default_factory=list)

    @property
    def shows_defect(self) -> bool:
        """Whether the systems compute different functions: tensors differ by more than rounding, even in float64.

        False if `narrow` is set: a call read numbers of a narrower dtype, whose rounding may explain the differences.
        """
        return self.beyond > 0 and self.narrow is None


@dataclass(frozen=True, kw_only=True)
class LayoutBounds:
    """Bounds and errors of two systems with different layouts.

    - `across`: the number of tensors of a step that were compared in pieces.
    - `exact`: the number of tensors that had to be equal in every bit.
    - `regrouped`: the number of tensors that may differ by rounding, within bounds.
    - `regrouped_from`: the first phase whose sums are grouped differently, None if there is none. In the first step,
      tensors of earlier phases are `exact`.
    - `samples`: the number of runs of the reference with reordered sums, which determine the bounds.
    - `confidence`: the probability that all these tensors are within their bounds if there is nothing but rounding.
    - `beyond`: the number of tensors that exceed their bound, or that differ although they had to be equal.
    - `near`: the number of tensors within their bound that differ by more than rounding usually does.
    - `rows`: first the tensors in `beyond`, in the order of computation, then the tensors that used most of their
      bound.
    - `in_float64`: a second test, only for systems that are within their bounds.
    """

    __pydantic_config__ = GROWING

    across: Count
    exact: Count
    regrouped: Count
    regrouped_from: Phase | None = None
    samples: Count = 0
    confidence: float | None = None
    beyond: Count = 0
    near: Count = 0
    rows: list[LayoutRow] = field(default_factory=list)
    in_float64: InFloat64 | None = None

    @property
    def is_within(self) -> bool:
        """Whether bounds were measured, and every tensor that differs is within its bound."""
        return self.samples > 0 and not self.beyond and not any(row.is_beyond for row in self.rows)

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains all differences: they are within bounds, and float64 shows no defect."""
        return self.is_within and not (self.in_float64 and self.in_float64.shows_defect)

    def describe(self) -> str:
        """Return the result as a sentence, such as "12 tensors have another layout; 13 had to be equal, ..."."""
        start = f", from {self.regrouped_from} on" if self.regrouped_from else ""
        counts = f"{self.exact} had to be equal, {self.regrouped} may be regrouped"
        text = f"{self.across} tensors have another layout; {counts}{start}"
        # Without samples no bound was measured, so only the counts are stated.
        if not self.samples or self.confidence is None:
            return text
        used = max((row.used for row in self.rows if row.used is not None), default=0.0)
        wide = ""
        if self.in_float64 is not None and not self.in_float64.failed:
            wide = f"; in float64, {self.in_float64.beyond} differ by more than rounding"
        return (
            f"{text}; {self.beyond} are beyond what {self.samples} runs with sums in other orders explain at "
            f"{100 * self.confidence:g}%, and the largest used share of a bound is {100 * used:.3g}%{wide}"
        )

    def table(self) -> list[tuple[str, ...]]:
        """Return the cells of a table: for each row its step, kind, tensor, relative error, bound and used share."""
        return [
            (
                *(str(row.step), row.kind, row.name, "infinite" if row.error is None else f"{row.error:.3g}"),
                "must be equal" if row.bound is None else f"{row.bound:.3g}",
                "" if row.used is None else f"{100 * row.used:.3g}%",
            )
            for row in self.rows
        ]
