"""Show the losses of rank 0 on the page: a sentence, a small chart, a table."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bitproof.harness.records import CaseResult

MAX_POINTS = 400
MAX_LOSSES = 40

_WIDTH, _HEIGHT, _LEFT, _TOP = 320, 96, 6, 6


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The losses of both systems as two lines in a picture.

    - `low`, `high`: the lowest and the highest loss.
    - `first`, `last`: the first and the last step.
    - `apart`: the x coordinate of the first difference; None if the losses are equal.
    """

    width: int
    height: int
    reference: list[str]
    candidate: list[str]
    low: str
    high: str
    first: int
    last: int
    apart: float | None


@dataclass(frozen=True, kw_only=True)
class LossBlock:
    """The losses of rank 0: a sentence, rows and, with at least two steps and a finite loss, a chart.

    - `rows`: for each step its number, its loss, the bits in both systems, and whether these bits agree.
    - `growth`: for each step from the first difference: its number, the distance in ULPs of float32, and a bar's length
      in percent.
    - `left_out`: the number of steps without a row.
    """

    sentence: str
    chart: Chart | None
    rows: list[tuple[int, str, str, str, bool]]
    left_out: int
    growth: list[tuple[int, str, int]]


def losses(result: CaseResult) -> LossBlock | None:
    reference, candidate = result.losses["reference"], result.losses["candidate"]
    num_steps, first = max(len(reference), len(candidate)), result.case.first_step
    if not num_steps:
        return None
    rows = [(first + place, _at(reference, place), _at(candidate, place)) for place in range(num_steps)]
    apart = [step for step, left, right in rows if left != right]
    return LossBlock(
        sentence=_describe_losses([row for row in rows if row[1] != row[2]], num_steps),
        chart=_chart(reference, candidate, [step - first for step in apart], first),
        # If a run ended early, only the other side's loss is known.
        rows=[
            (step, f"{float.fromhex(left or right):.6f}", left or "missing", right or "missing", left == right)
            for step, left, right in rows[:MAX_LOSSES]
        ],
        left_out=max(0, num_steps - MAX_LOSSES),
        growth=_growth(rows, apart),
    )


def _growth(rows: Sequence[tuple[int, str, str]], apart: list[int]) -> list[tuple[int, str, int]]:
    # A single difference does not grow, so it needs no picture.
    since = [row for row in rows if apart and row[0] >= apart[0]][:MAX_LOSSES]
    found = [
        (step, *distance)
        for (step, _, _), distance in zip(since, _ulps_by_step([row[1:] for row in since]), strict=True)
    ]
    return found if sum(bool(ulps) for _, ulps, _ in found) > 1 else []


def _at(losses: list[str], step: int) -> str:
    return losses[step] if step < len(losses) else ""


def _describe_losses(apart: list[tuple[int, str, str]], num_steps: int) -> str:
    if not apart:
        return f"The same bits on both sides at all {num_steps} steps."
    step, left, right = apart[0][0], *(loss or "missing" for loss in apart[0][1:])
    steps = f"{len(apart)} of {num_steps} steps" if num_steps > 1 else "the only step"
    return f"They differ at {steps}, first at step {step}: {left} in the reference, {right} in the candidate."


def _chart(reference: list[str], candidate: list[str], apart: list[int], first: int) -> Chart | None:
    sides = [[float.fromhex(loss) for loss in losses] for losses in (reference, candidate)]
    finite = [value for side in sides for value in side if math.isfinite(value)]
    num_steps = max(map(len, sides))
    if num_steps < 2 or not finite:
        return None
    low, high = min(finite), max(finite)
    # A constant loss would otherwise divide by zero below.
    span = (high - low) or 1.0

    def x(step: int) -> float:
        return round(_LEFT + (_WIDTH - 2 * _LEFT) * step / (num_steps - 1), 1)

    def y(value: float) -> float:
        return round(_TOP + (_HEIGHT - 2 * _TOP) * (high - value) / span, 1)

    stride = max(1, math.ceil(num_steps / MAX_POINTS))
    lines = [
        [" ".join(f"{x(step)},{y(value)}" for step, value in run) for run in _finite_runs(side, stride)]
        for side in sides
    ]
    return Chart(
        width=_WIDTH,
        height=_HEIGHT,
        reference=lines[0],
        candidate=lines[1],
        low=f"{low:.4g}",
        high=f"{high:.4g}",
        first=first,
        last=first + num_steps - 1,
        apart=x(apart[0]) if apart else None,
    )


def _finite_runs(losses: list[float], stride: int) -> Iterator[list[tuple[int, float]]]:
    run: list[tuple[int, float]] = []
    for step in range(0, len(losses), stride):
        if math.isfinite(losses[step]):
            run.append((step, losses[step]))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _ulps_by_step(losses: Sequence[tuple[str, str]]) -> list[tuple[str, int]]:
    apart = [_ulps(*pair) for pair in losses]
    # Bars show the number's bits, a logarithm: a distance may grow from 1 to millions of ULPs in a few steps.
    longest = max((number.bit_length() for number in apart if number), default=0)
    return [
        ("", 0) if number is None else (f"{number:,}", round(100 * number.bit_length() / max(1, longest)))
        for number in apart
    ]


def _ulps(reference: str, candidate: str) -> int | None:
    """Return the distance of two losses in ULPs of float32; None if one is missing, not finite, or not a float32."""
    if not reference or not candidate:
        return None
    values = [float.fromhex(text) for text in (reference, candidate)]
    # Larger numbers are no float32, and `struct` raises for them.
    if not all(map(math.isfinite, values)) or any(abs(value) > 3.4e38 for value in values):
        return None
    # A loss may have another dtype, such as float64 for a sum of losses. Then ULPs of float32 mean nothing.
    if any(struct.unpack("<f", struct.pack("<f", value))[0] != value for value in values):
        return None
    left, right = (struct.unpack("<i", struct.pack("<f", value))[0] for value in values)
    # Sign and magnitude to two's complement, so that neighbouring floats are neighbouring integers across zero.
    ordered = [number if number >= 0 else -(number & 0x7FFFFFFF) for number in (left, right)]
    return abs(ordered[0] - ordered[1])
