"""Bounds how far tensors may differ if only the order of sums changed: some must be equal, others may be rounded.

1. `phases.py` decides which tensors must agree in every bit.
2. For the others, the effect of rounding is measured: the reference runs a few more times with its sums in other orders
   (`reordered_sums`). These runs are the samples.
3. A tensor's spread is the root mean square of its distances, in the samples, from the reference. A distance is
   Euclidean, over all elements.
4. A tensor's bound is its spread times Student's quantile. With probability CONFIDENCE, rounding keeps all tensors
   within their bounds. A bound is at least FEWEST_UNITS units in the last place of the tensor's norm.
5. A tensor within its bound, but moved by more than NEAR_SPREADS spreads and more than a unit, counts as `near`.
   Rounding moves a tensor by 1 spread, at most 2 (`bench_layouts.py defects`).

With three samples and a hundred tensors, a bound is 35 spreads; with twelve samples, 6 spreads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor as Values

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.capture.values import open_values_of
from bitproof.harness.case import Case
from bitproof.harness.compare.bits import bits_equal, is_unlike
from bitproof.harness.compare.order import computation_order
from bitproof.harness.compare.part_layouts import LogicalTensor, layouts_differ
from bitproof.harness.powers.two_layouts.phases import PHASES, first_step_of_own_layout, is_exact, regrouped_between
from bitproof.harness.powers.two_layouts.reshard import box_of, by_rank
from bitproof.harness.records import CHANGED, InFloat64, Key, LayoutBounds, LayoutRow, Recording
from bitproof.harness.records.layout import Box, alike, joint_cuts
from bitproof.harness.records.layout_bounds import MAX_ROWS

CONFIDENCE = 0.99
FEWEST_UNITS = 4
NEAR_SPREADS = 2.5
MARGIN = 2.0**14
"""A difference in float64 of more than this many spreads is not rounding.

From float32 to float64, rounding shrinks by 2^29, but a defect does not. This factor has half of these 29 bits, so a
single sample is enough to estimate the spread.
"""
NEARLY_ALL = 0.95
"""Quantile of the tensors' ratios of errors that decides whether the candidate is less accurate.

The largest ratios are ignored, because the reference may be exact in a small tensor by chance.
"""


def layouts_of(_: Case, reference: str, candidate: str, samples: list[str], apart: list[list[Any]]) -> dict[str, Any]:
    """Call `measure_layouts` for a process without torch: arguments and result are values of JSON."""
    return vars(measure_layouts(*_folders(reference, candidate, samples), [LogicalTensor(*each) for each in apart]))


def in_float64_of(_: Case, wide: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Call `measure_in_float64` for a process without torch: arguments and result are values of JSON."""
    apart = [LogicalTensor(*each) for each in plain.pop("apart")]
    return vars(measure_in_float64(_folders(**wide), _folders(**plain), apart))


def _folders(reference: str, candidate: str, samples: list[str]) -> tuple[Path, Path, list[Path]]:
    return Path(reference), Path(candidate), [Path(each) for each in samples]


def measure_layouts(
    reference: Path, candidate: Path, samples: Sequence[Path], apart: Collection[LogicalTensor] = ()
) -> LayoutBounds:
    """Measure how far each tensor of the candidate is from the reference's, and how far rounding alone may move it.

    The result has a row for each tensor that differs. The row has the tensor's error, and the bound on errors that sums
    in other orders cause.

    - `samples`: recordings of the reference with its sums in other orders.
    - `apart`: tensors that get no bound, because their copies on several ranks differ.

    Raises RecordingError if a value does not have its recorded digest.
    """
    folders = (reference, candidate, *samples)
    recordings = [read_recording(folder) for folder in folders]
    first = regrouped_between(*recordings[:2])
    start = first_step_of_own_layout(recordings[1].manifest)
    have_as_many = recordings[0].manifest.world_size == recordings[1].manifest.world_size
    # Before `start` another number of ranks took the steps, so records do not pair.
    compared = recordings[0].from_step(0 if have_as_many else start)
    names = [*dict.fromkeys(LogicalTensor(key.step, key.kind, key.name) for key in compared.records)]
    free = [tensor for tensor in names if not is_exact(tensor, first, start)]
    stages = 2  # a tensor is compared with two bounds, of few and of all samples
    # The probability of an error is divided among the tensors (Bonferroni), so that it holds for all together.
    factor = student_quantile((1 - CONFIDENCE) / stages / max(1, len(free)), len(samples))
    near = 0
    rows: list[LayoutRow] = []
    with ExitStack() as stack:
        sides = [_Side(folder, recording, stack) for folder, recording in zip(folders, recordings, strict=True)]
        for tensor in names:
            if tensor not in sides[1].parts and (tensor.kind == "buffer" or tensor.name.endswith(CHANGED)):
                continue  # only the reference has it; `one_sided` decides about it
            found = _distances(tensor, sides)
            if found.error > 0 or tensor in apart:
                bound = None if tensor in apart or is_exact(tensor, first, start) else found.bound(factor)
                error = _finite(found.relative(found.error))
                row = LayoutRow(**tensor._asdict(), error=error, bound=bound, rank=found.rank, apart=tensor in apart)
                # A tensor beyond its bound is a difference, and no hint of a small one.
                near += found.is_near and not row.is_beyond
                rows.append(row)
    order = computation_order(recordings[0].records)
    rows.sort(key=lambda row: order(Key(row.step, row.kind, row.name, 0)))
    # This sort is stable: rows beyond their bound stay in the order of computation.
    rows.sort(key=lambda row: (not row.is_beyond, 0.0 if row.is_beyond else -(row.used or 0.0)))
    return LayoutBounds(
        across=sum(_is_divided_differently(tensor, *sides[:2]) for tensor in names),
        exact=len(names) - len(free),
        regrouped=len(free),
        regrouped_from=None if first is None else PHASES[first],
        samples=len(samples),
        confidence=CONFIDENCE,
        beyond=sum(row.is_beyond for row in rows),
        near=near,
        rows=rows[:MAX_ROWS],
    )


def measure_in_float64(
    wide: tuple[Path, Path, Sequence[Path]],
    plain: tuple[Path, Path, Sequence[Path]],
    apart: Collection[LogicalTensor] = (),
) -> InFloat64:
    """Compare two layouts by runs in float64, where rounding is tiny and a defect is not.

    - `wide`: recordings in float64 of the reference, the candidate, and samples. A sample is a run of the reference
      with its sums in other orders.
    - `plain`: the same recordings in the case's precision.
    - `apart`: tensors that are left out.

    The candidate counts as less accurate if its errors are significantly larger than those of the plain reference and
    its samples. Raises RecordingError if a value does not have its recorded digest.
    """
    folders = (wide[0], wide[1], *wide[2], plain[0], plain[1], *plain[2])
    recordings = [read_recording(folder) for folder in folders]
    num_wide = 2 + len(wide[2])
    rows: list[LayoutRow] = []
    ratios: list[float] = []
    with ExitStack() as stack:
        sides = [_Side(folder, recording, stack) for folder, recording in zip(folders, recordings, strict=True)]
        in_float64, (reference, candidate, *samples) = sides[:num_wide], sides[num_wide:]
        names = [tensor for tensor in candidate.parts if tensor in reference.parts and tensor not in apart]
        for tensor in names:
            if not _distances(tensor, (reference, candidate)).error:
                continue
            # First question: a tensor that differs in the plain runs, and by more than MARGIN spreads in float64, is
            # not explained by rounding.
            found = _distances(tensor, in_float64)
            # A single sample estimates the spread, which MARGIN allows for.
            bound, error = MARGIN * found.bound(1.0), _finite(found.relative(found.error))
            rows.append(LayoutRow(**tensor._asdict(), error=error, bound=bound, rank=found.rank))
            # Second question, about accuracy: the reference in float64 is nearly exact, and the plain reference is one
            # sample among several.
            rounding = _distances(tensor, (in_float64[0], candidate, reference, *samples), of_one_dtype=False)
            if rounding.spread:
                ratios.append(rounding.error / rounding.spread)
    order = computation_order(recordings[0].records)
    rows.sort(key=lambda row: order(Key(row.step, row.kind, row.name, 0)))
    rows.sort(key=lambda row: (not row.is_beyond, 0.0 if row.is_beyond else -(row.used or 0.0)))
    ratio = sorted(ratios)[int(NEARLY_ALL * (len(ratios) - 1))] if ratios else 0.0
    is_explained = ratio <= student_quantile(1 - CONFIDENCE, 1 + len(samples))
    return InFloat64(
        beyond=sum(row.is_beyond for row in rows),
        less_accurate=None if is_explained or not math.isfinite(ratio) else ratio,
        rows=rows[:MAX_ROWS],
    )


def student_quantile(level: float, degrees: int) -> float:
    """Return Student's two-sided quantile: the factor that |error / spread| exceeds with probability `level`.

    The spread is a standard deviation, estimated from `degrees` samples.
    """
    # Found by bisection, since the probability to exceed a distance falls as the distance grows.
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - _student_within(middle, degrees) > level else (low, middle)
    return high


def _student_within(t: float, degrees: int) -> float:
    # Student, Biometrika 6 (1908), 1. Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.
    # The sums of 26.7.3 and 26.7.4: in powers of the cosine, even powers for even degrees of freedom, odd for odd.
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term = total = cosine if is_odd else 1.0
    for number in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cosine * cosine * (number - 1) / number
        total += term
    if not is_odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if degrees > 1 else 0.0))


@dataclass(frozen=True)
class Distances:
    """A tensor's distances from the reference, for the candidate and for further runs of the reference.

    - `error`: distance of the candidate's tensor.
    - `samples`: distances of runs of the reference with sums in other orders.
    - `norm`: norm of the reference's tensor.
    - `least`: lower limit for the tensor's bound, as a distance.
    - `rank`: the candidate's first rank on which the tensor differs.
    """

    rank: int
    error: float
    samples: tuple[float, ...]
    norm: float
    least: float

    def bound(self, factor: float) -> float:
        """Return the largest relative error that other orders of sums explain.

        It is `factor` times the spread, but at least `least`, as a fraction of the norm.
        """
        spread = self.spread
        return self.relative(max(factor * spread, self.least)) if math.isfinite(spread) else math.inf

    @property
    def spread(self) -> float:
        """The root mean square of the distances of the samples."""
        return math.sqrt(sum(distance * distance for distance in self.samples) / len(self.samples))

    @property
    def is_near(self) -> bool:
        """Whether the tensor moved farther than rounding usually moves it. If so, more samples are worth the time."""
        return self.error > NEAR_SPREADS * self.spread and self.error > self.least / FEWEST_UNITS

    def relative(self, distance: float) -> float:
        """Return a distance as a fraction of the tensor's norm.

        If the norm is 0, the result is infinite, or 0 for a distance of 0.
        """
        return distance / self.norm if self.norm else (0.0 if distance == 0 else math.inf)


class _Side:
    """A recording and its open files of values, from which single tensors are read."""

    def __init__(self, folder: Path, recording: Recording, stack: ExitStack) -> None:
        self.recording = recording
        self.parts = by_rank(recording)
        ranks = range(recording.manifest.world_size)
        self._files = [stack.enter_context(open_values_of(folder, recording, rank)) for rank in ranks]

    def value(self, tensor: LogicalTensor, rank: int) -> Values:
        key = Key(*tensor, rank)
        return self._files[rank].read_recorded(key, self.recording.records[key])


class _Cell(NamedTuple):
    """A part of a tensor that each rank of either system has completely or not at all.

    - `here`, `at`: a rank of the reference that has the part, and the slices that select the part there.
    - `there`: all such ranks of the candidate, each with its slices.
    """

    here: int
    at: tuple[slice, ...]
    there: list[tuple[int, tuple[slice, ...]]]


def _distances(tensor: LogicalTensor, sides: Sequence[_Side], *, of_one_dtype: bool = True) -> Distances:
    """Measure a tensor's distance, in each further recording, from the same tensor in the first recording.

    The first recording is the reference's, the second is the candidate's, and all others are further ones of the
    reference. Without `of_one_dtype`, floats of different dtypes are compared as float64.
    """
    squares, norm, eps = [0.0] * (len(sides) - 1), 0.0, 0.0
    values: dict[tuple[int, int], Values] = {}
    ranks: set[int] = set()

    def value(side: int, rank: int) -> Values:
        if (side, rank) not in values:
            found = sides[side].value(tensor, rank)
            found = found if of_one_dtype or not found.is_floating_point() else found.double()
            values[side, rank] = found.reshape(-1) if is_flat else found
        return values[side, rank]

    is_flat, units = _cells_of(tensor, *sides[:2])
    for cell in units:
        own = value(0, cell.here)[cell.at]
        if not own.numel():
            continue
        there = {rank: squared_distance(own, value(1, rank)[at]) for rank, at in cell.there}
        # A cell that no rank of the candidate has is infinitely far.
        # Of several ranks that have the cell, the one with the largest distance counts.
        squares[0] += max(there.values(), default=math.inf)
        ranks |= {rank for rank, distance in there.items() if distance}
        for place in range(2, len(sides)):
            squares[place - 1] += squared_distance(own, value(place, cell.here)[cell.at])
        if own.is_floating_point():
            finite = own.double()[own.isfinite()]
            norm += float(finite.square().sum())
            eps = torch.finfo(own.dtype).eps
    error, *samples = map(math.sqrt, squares)
    size = math.sqrt(norm)
    return Distances(min(ranks, default=0), error, tuple(samples), size, FEWEST_UNITS * eps * size)


def _is_divided_differently(tensor: LogicalTensor, reference: _Side, candidate: _Side) -> bool:
    sizes = {side.recording.manifest.world_size for side in (reference, candidate)}
    return layouts_differ(reference.parts[tensor], candidate.parts.get(tensor, {}), len(sizes) == 1)


def _cells_of(tensor: LogicalTensor, reference: _Side, candidate: _Side) -> tuple[bool, list[_Cell]]:
    here, there = reference.parts[tensor], candidate.parts.get(tensor, {})
    if not _is_divided_differently(tensor, reference, candidate):
        # Both systems divide the tensor in the same way: the part of each rank is a cell.
        return False, [_Cell(rank, (), [(rank, ())] if rank in there else []) for rank in here]
    boxes = [
        (side, rank, box)
        for side, parts in enumerate((here, there))
        for rank, record in parts.items()
        if (box := box_of(record))
    ]
    same = alike(box for *_, box in boxes)
    # The parts cannot be matched: then no rank of the candidate has any cell, and the distance is infinite.
    if not same:
        return False, [_Cell(rank, (), []) for rank in here]
    # With these cuts, no part of either system contains only a piece of a cell.
    cuts = joint_cuts(same)
    known: list[dict[int, Box]] = [{}, {}]
    for (side, rank, _), box in zip(boxes, same, strict=True):
        known[side][rank] = box
    holders: dict[object, list[tuple[int, tuple[slice, ...]]]] = {}
    for rank, box in known[1].items():
        for cell in box.cells(cuts):
            holders.setdefault(cell, []).append((rank, box.slices(cell)))
    # Several ranks of the reference may have a cell; the first of them counts for all.
    found: list[_Cell] = []
    done = set()
    for rank, box in known[0].items():
        for cell in box.cells(cuts):
            if cell not in done:
                done.add(cell)
                found.append(_Cell(rank, box.slices(cell), holders.get(cell, [])))
    return same[0].is_flat, found


def squared_distance(own: Values, other: Values) -> float:
    """Return the squared distance of two tensors; infinite unless dtype, shape, NaNs, infinities and integers agree.

    If two tensors differ only in signs of zero, it is the smallest positive number.
    """
    if own.dtype != other.dtype or own.shape != other.shape:
        return math.inf
    if not own.is_floating_point():
        return 0.0 if torch.equal(own, other) else math.inf
    left, right = own.double(), other.double()
    # NaNs and infinities at the same indices in both are equal, and add no distance.
    if is_unlike(left, right).any():
        return math.inf
    distance = float((left - right)[left.isfinite()].square().sum())
    return distance if distance or bits_equal(own, other) else math.ulp(0.0)  # zeros of opposite sign differ


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
