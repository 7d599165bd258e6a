"""The losses of rank 0 on the page: a sentence, a small chart, the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bitproof.harness.records import CaseResult

MAX_POINTS = 400
MAX_LOSSES = 40

_WIDTH, _HEIGHT, _LEFT, _TOP = 320, 96, 6, 6


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Both sides as unbroken lines of points in a box; `low` and `high` are losses, `apart` is where they part."""

    width: int
    height: int
    reference: list[str]
    candidate: list[str]
    low: str
    high: str
    last: int
    apart: float | None


@dataclass(frozen=True, kw_only=True)
class LossBlock:
    """A sentence, a chart where there is one, and a row a step: its value, both sides' bits, whether they agree."""

    sentence: str
    chart: Chart | None
    rows: list[tuple[int, str, str, str, bool]]
    left_out: int


def losses(result: CaseResult) -> LossBlock | None:
    """What the page says of the losses of rank 0; None without any."""
    reference, candidate = result.losses["reference"], result.losses["candidate"]
    num_steps = max(len(reference), len(candidate))
    if not num_steps:
        return None
    rows = [(step, _at(reference, step), _at(candidate, step)) for step in range(num_steps)]
    apart = [step for step, left, right in rows if left != right]
    return LossBlock(
        sentence=_tell_losses(apart, reference, candidate, num_steps),
        chart=_chart(reference, candidate, apart),
        rows=[
            (step, f"{float.fromhex(left or right):.6f}", left or "missing", right or "missing", left == right)
            for step, left, right in rows[:MAX_LOSSES]
        ],
        left_out=max(0, num_steps - MAX_LOSSES),
    )


def _at(losses: list[str], step: int) -> str:
    return losses[step] if step < len(losses) else ""


def _tell_losses(apart: list[int], reference: list[str], candidate: list[str], num_steps: int) -> str:
    if not apart:
        return f"The same bits on both sides at all {num_steps} steps."
    step = apart[0]
    left, right = (_at(losses, step) or "missing" for losses in (reference, candidate))
    steps = f"{len(apart)} of {num_steps} steps" if num_steps > 1 else "the only step"
    return f"They differ at {steps}, first at step {step}: {left} in the reference, {right} in the candidate."


def _chart(reference: list[str], candidate: list[str], apart: list[int]) -> Chart | None:
    """Both sides as lines in a box of _WIDTH x _HEIGHT; what is not finite leaves a gap."""
    sides = [[float.fromhex(loss) for loss in losses] for losses in (reference, candidate)]
    finite = [value for side in sides for value in side if math.isfinite(value)]
    num_steps = max(map(len, sides))
    if num_steps < 2 or not finite:
        return None
    low, high = min(finite), max(finite)
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
        last=num_steps - 1,
        apart=x(apart[0]) if apart else None,
    )


def _finite_runs(losses: list[float], stride: int) -> Iterator[list[tuple[int, float]]]:
    """Unbroken runs of finite losses, every stride-th of them."""
    run: list[tuple[int, float]] = []
    for step in range(0, len(losses), stride):
        if math.isfinite(losses[step]):
            run.append((step, losses[step]))
        elif run:
            yield run
            run = []
    if run:
        yield run
