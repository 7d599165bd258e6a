"""A rank's part of a logical tensor, and the cells into which two layouts divide the tensor.

A *box* is a rank's part: half-open runs of indices in each dim. An FSDP shard is a single run of one dim; an
interleaved shard of tensor parallelism may have several. A replica's box is the whole tensor. A *cell* is a box with
one run per dim, and no cut of either layout divides it: a rank of either layout has all of it or nothing of it.

For example, two ranks with rows 0:4 and 4:8, and a layout with rows 0:2 and 2:8, have the cells 0:2, 2:4 and 4:8.

FSDP1 flattens parameters and may cut within a row: a *flat* box has runs of the flattened tensor's elements. It can be
compared with a box that consists of whole slices of the first dim, because such slices are runs of elements as well.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Run = tuple[int, int]
"""A half-open range of indices."""
Cell = tuple[Run, ...]
Cuts = tuple[tuple[int, ...], ...]
"""For each dim the indices at which runs begin or end, ascending."""

_BOX = re.compile(r"\[([0-9:+, ]*)\] of (flat )?\[([0-9, ]*)\]")
DIGEST_DIGITS = 32
MAX_TEXT = 1000
"""The most characters of a box's text. A box with a longer text is not recorded."""


@dataclass(frozen=True, kw_only=True)
class Regroup:
    """Settings of a regrouped run: sums in `parts` parts, in an order drawn from the seed, from `first_step` on."""

    seed: int
    parts: int
    first_step: int = 0


class Recorded(NamedTuple):
    """The folder of a recording. `narrow`, for runs in float64 only, is the first call that read a narrower dtype."""

    folder: Path
    narrow: str | None = None


@dataclass(frozen=True, kw_only=True)
class Across:
    """A request to one of two systems with different layouts: digest the cells into which `cuts` divide tensors.

    A cell is a part of a logical tensor that neither layout divides. With `keeps_values` the run also stores values, so
    errors can be measured. With `regroup` it takes its sums in other orders, and with `in_float64` it computes
    everything in float64.
    """

    cuts: dict[str, Cuts]
    keeps_values: bool = False
    regroup: Regroup | None = None
    in_float64: bool = False


@dataclass(frozen=True)
class Box:
    """A part of a tensor of `shape`. `runs` has the selected runs of each dim; a flat box has runs of the flattened
    tensor."""

    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    is_flat: bool = False

    def __str__(self) -> str:
        dims = ("+".join(f"{first}:{end}" for first, end in runs) for runs in self.runs)
        return f"[{', '.join(dims)}] of {'flat ' if self.is_flat else ''}{list(self.shape)}"

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of a whole tensor of this shape."""
        return Box(tuple(shape), tuple(((0, size),) for size in shape))

    @staticmethod
    def parse(text: str) -> Box:
        """The box of a text that `str` returned. Raises ValueError for any other text, and for runs outside the
        tensor."""
        found = _BOX.fullmatch(text)
        if found is None:
            raise ValueError(f"no part of a tensor: {text[:100]!r}")
        shape = tuple(int(size) for size in found[3].split(", ") if size)
        dims = [dim for dim in found[1].split(", ") if dim]
        runs = tuple(tuple(_run(text) for text in dim.split("+")) for dim in dims)
        sizes = (math.prod(shape),) if found[2] else shape
        if len(runs) != len(sizes) or not all(map(_ascend, runs, sizes)):
            raise ValueError(f"no part of a tensor: {text[:100]!r}")
        return Box(shape, runs, bool(found[2]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        return tuple(sum(end - first for first, end in runs) for runs in self.runs)

    @property
    def flat(self) -> Box | None:
        """The same part as a flat box; None unless it is whole slices of the first dim."""
        if self.is_flat:
            return self
        if any(runs != ((0, size),) for runs, size in zip(self.runs[1:], self.shape[1:], strict=True)):
            return None
        # A scalar has no dim; it is a single element.
        step, runs = math.prod(self.shape[1:]), self.runs[0] if self.runs else ((0, 1),)
        return Box(self.shape, (tuple((first * step, end * step) for first, end in runs),), is_flat=True)

    def cut_by(self, cuts: Cuts) -> Box | None:
        """The form of this box that has as many dims as the cuts: itself, or the flat box for flat cuts. None if it has
        no such form."""
        return self if len(cuts) == len(self.runs) else self.flat if len(cuts) == 1 else None

    def cells(self, cuts: Cuts) -> list[Cell]:
        """The box's cells, in row-major order. A box without elements has none."""
        return [*itertools.product(*(_divided(runs, at) for runs, at in zip(self.runs, cuts, strict=True)))]

    def slices(self, cell: Cell) -> tuple[slice, ...]:
        """The slices that select a cell in the rank's local tensor."""
        return tuple(_slice_within(runs, run) for runs, run in zip(self.runs, cell, strict=True))


def is_box(text: str) -> bool:
    """Whether an untrusted text is a box."""
    try:
        return len(text) <= MAX_TEXT and Box.parse(text) is not None
    except ValueError:
        return False


def alike(boxes: Iterable[Box]) -> list[Box]:
    """The boxes in a common form: all flat if any of them is flat. Empty if that is impossible, or if their tensors
    have different shapes."""
    boxes = list(boxes)
    if any(box.is_flat for box in boxes):
        flat = [box.flat for box in boxes]
        boxes = [box for box in flat if box is not None] if None not in flat else []
    return boxes if len({box.shape for box in boxes}) == 1 else []


def joint_cuts(boxes: Iterable[Box]) -> Cuts:
    """The indices at which any of these boxes of the same tensor begins or ends, per dim."""
    boxes = list(boxes)
    return tuple(
        tuple(sorted({index for box in boxes for run in box.runs[dim] for index in run}))
        for dim in range(len(boxes[0].runs))
    )


def name_cell(cell: Cell) -> str:
    """A cell as text, such as [0:4, 8:16]."""
    return f"[{', '.join(f'{first}:{end}' for first, end in cell)}]"


def _run(text: str) -> Run:
    first, _, end = text.partition(":")
    return int(first), int(end)


def _ascend(runs: Sequence[Run], size: int) -> bool:
    """Whether runs are in ascending order within a dim; an empty part is a single run without indices."""
    ends = [index for run in runs for index in run]
    return ends == sorted(ends) and ends[-1] <= size and (len(runs) == 1 or all(first < end for first, end in runs))


def _divided(runs: Iterable[Run], cuts: Sequence[int]) -> list[Run]:
    found = []
    for first, end in runs:
        at = [first, *(cut for cut in cuts if first < cut < end), end]
        found += [run for run in itertools.pairwise(at) if run[0] < run[1]]
    return found


def _slice_within(runs: Iterable[Run], cell: Run) -> slice:
    before = 0
    for first, end in runs:
        if first <= cell[0] and cell[1] <= end:
            return slice(before + cell[0] - first, before + cell[1] - first)
        # A rank's part has its runs one after the other, so earlier runs shift the indices.
        before += end - first
    raise ValueError(f"{cell} lies in none of {list(runs)}")
