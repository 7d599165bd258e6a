"""A rank's part of a logical tensor, and the cells into which two layouts divide the tensor.

- A *box* is a rank's part: ranges of indices in each dim. An FSDP shard has a single range of one dim. An interleaved
  shard of tensor parallelism may have several. A replica has the whole tensor.
- A *cut* is an index at which a range of some rank begins or ends.
- A *cell* is a box between neighbouring cuts. Each rank has either all of a cell or none of it.

For example, two ranks with rows 0:4 and 4:8, and a layout with rows 0:2 and 2:8, have the cells 0:2, 2:4 and 4:8.

FSDP1 flattens parameters and may cut within a row. Its *flat* boxes have ranges of the flattened tensor's elements. A
flat box can be compared with whole slices of the first dim, which are ranges of elements as well.
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
"""For each dim, the indices at which ranges begin or end, ascending."""

# The text of a box: its runs in each dim, and the shape of the tensor, such as "[0:4+8:12, 0:8] of [16, 8]".
_BOX = re.compile(r"\[([0-9:+, ]*)\] of (flat )?\[([0-9, ]*)\]")
DIGEST_DIGITS = 32
MAX_TEXT = 1000
"""The most characters of a box's text. A box with a longer text is not recorded."""


@dataclass(frozen=True, kw_only=True)
class Regroup:
    """Settings of a run in which sums are computed in another order.

    From step `first_step` on, the terms of each sum are divided into `parts` parts, in an order drawn from `seed`.
    """

    seed: int
    parts: int
    first_step: int = 0


class Recorded(NamedTuple):
    """The folder of a recording, and `narrow`.

    `narrow` is set in runs in float64: the first call that read numbers of a narrower dtype, which may be rounded. None
    if no call did.
    """

    folder: Path
    narrow: str | None = None


@dataclass(frozen=True, kw_only=True)
class Across:
    """A request to run one of two systems with different layouts of ranks, and to digest the cells of each tensor.

    A cell is a part of a whole tensor that neither layout divides.

    - `cuts`: by tensor name, the indices at which cells begin or end.
    - `keeps_values`: whether the run also stores values, so that errors can be measured.
    - `regroup`: if given, the run computes sums in another order.
    - `in_float64`: whether the run computes everything in float64.
    """

    cuts: dict[str, Cuts]
    keeps_values: bool = False
    regroup: Regroup | None = None
    in_float64: bool = False


@dataclass(frozen=True)
class Box:
    """A rank's part of a tensor of `shape`: for each dim, the ranges of indices that the part covers (`runs`).

    A flat box has ranges of the flattened tensor, in a single dim.
    """

    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    is_flat: bool = False

    def __str__(self) -> str:
        dims = ("+".join(f"{first}:{end}" for first, end in runs) for runs in self.runs)
        return f"[{', '.join(dims)}] of {'flat ' if self.is_flat else ''}{list(self.shape)}"

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        return Box(tuple(shape), tuple(((0, size),) for size in shape))

    @staticmethod
    def parse(text: str) -> Box:
        """Convert a text such as "[0:4, 0:8] of [8, 8]", which `str` made from a box, back to the box.

        Raises ValueError for any other text, and for ranges outside the tensor.
        """
        found = _BOX.fullmatch(text)
        if found is None:
            raise ValueError(f"no part of a tensor: {text[:100]!r}")
        shape = tuple(int(size) for size in found[3].split(", ") if size)
        # A scalar has no dim, and its text is "[] of []".
        dims = [dim for dim in found[1].split(", ") if dim]
        runs = tuple(tuple(_run(text) for text in dim.split("+")) for dim in dims)
        # A flat box has a single dim with all elements.
        sizes = (math.prod(shape),) if found[2] else shape
        if len(runs) != len(sizes) or not all(map(_ascend, runs, sizes)):
            raise ValueError(f"no part of a tensor: {text[:100]!r}")
        return Box(shape, runs, bool(found[2]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(end - first for first, end in runs) for runs in self.runs)

    @property
    def flat(self) -> Box | None:
        """The same part as a flat box; None if the part does not consist of whole slices of the first dim."""
        if self.is_flat:
            return self
        # Whole in every dim but the first: then the part's elements are consecutive in memory.
        if any(runs != ((0, size),) for runs, size in zip(self.runs[1:], self.shape[1:], strict=True)):
            return None
        # A scalar has no dim; it is a single element.
        step, runs = math.prod(self.shape[1:]), self.runs[0] if self.runs else ((0, 1),)
        return Box(self.shape, (tuple((first * step, end * step) for first, end in runs),), is_flat=True)

    def cut_by(self, cuts: Cuts) -> Box | None:
        """Return this box in the form to which `cuts` apply: flat if the cuts are of the flattened tensor, else
        unchanged.

        Return None if the box has no such form.
        """
        # A single tuple of cuts is for the flattened tensor, unless the tensor itself has one dim.
        return self if len(cuts) == len(self.runs) else self.flat if len(cuts) == 1 else None

    def cells(self, cuts: Cuts) -> list[Cell]:
        """Return the cells into which `cuts` divide this box, in row-major order; empty for a box without elements."""
        # Every combination of the ranges between cuts, one for each dim.
        return [*itertools.product(*(_divided(runs, at) for runs, at in zip(self.runs, cuts, strict=True)))]

    def slices(self, cell: Cell) -> tuple[slice, ...]:
        """Return the slices that select a cell in the rank's local tensor, a slice per dim."""
        return tuple(_slice_within(runs, run) for runs, run in zip(self.runs, cell, strict=True))


def is_box(text: str) -> bool:
    """Whether an untrusted text is the text of a box, of at most MAX_TEXT characters."""
    try:
        return len(text) <= MAX_TEXT and Box.parse(text) is not None
    except ValueError:
        return False


def alike(boxes: Iterable[Box]) -> list[Box]:
    """Convert boxes to the same form: all become flat if any of them is flat, otherwise all stay unchanged.

    Returns an empty list if a box has no flat form, or if the boxes' tensors have different shapes.
    """
    boxes = list(boxes)
    # Cuts of a flat box are positions in memory, and cannot be compared with indices of dims.
    if any(box.is_flat for box in boxes):
        flat = [box.flat for box in boxes]
        boxes = [box for box in flat if box is not None] if None not in flat else []
    return boxes if len({box.shape for box in boxes}) == 1 else []


def joint_cuts(boxes: Iterable[Box]) -> Cuts:
    """Return, for each dim, the indices at which an index range of any of the boxes begins or ends.

    All boxes are parts of the same tensor. For example, boxes with rows 0:4 and 4:8 of a tensor of shape [8] have the
    cuts 0, 4 and 8.
    """
    boxes = list(boxes)
    return tuple(
        tuple(sorted({index for box in boxes for run in box.runs[dim] for index in run}))
        for dim in range(len(boxes[0].runs))
    )


def name_cell(cell: Cell) -> str:
    """Return a cell as text, such as [0:4, 8:16]."""
    return f"[{', '.join(f'{first}:{end}' for first, end in cell)}]"


def _run(text: str) -> Run:
    first, _, end = text.partition(":")
    return int(first), int(end)


def _ascend(runs: Sequence[Run], size: int) -> bool:
    """Whether the ranges of a dim of this size ascend and are not empty. True also for a single empty range, which a
    part without elements has.
    """
    ends = [index for run in runs for index in run]
    return ends == sorted(ends) and ends[-1] <= size and (len(runs) == 1 or all(first < end for first, end in runs))


def _divided(runs: Iterable[Run], cuts: Sequence[int]) -> list[Run]:
    found = []
    for first, end in runs:
        # An empty run has no cell.
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
