"""Windows: the elements of a tensor that a view selects, as (shape, strides, offset).

Elements are counted in row-major order of the tensor, whatever its layout in memory. Index (i, j) of a window selects
element number offset + i * strides[0] + j * strides[1]. For example, the transpose of a (2, 3) tensor is the window
((3, 2), (1, 3), 0).

Equal windows have equal numbers: a dim of size 1 has stride 0. A window without elements has only zeros as strides and
offset.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """The elements of a tensor that a view selects; the module's docstring has an example."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def window(shape: Sequence[int], strides: Sequence[int], offset: int) -> Window:
    """Return a window whose redundant numbers are 0.

    Redundant are the stride of a dim of size 1 and, if there are no elements, all strides and the offset.
    """
    if 0 in shape:
        return Window(tuple(shape), (0,) * len(shape), 0)
    return Window(tuple(shape), tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True)), offset)


# Layers repeat the same arithmetic, so each function caches 65,536 results.


@functools.lru_cache(maxsize=1 << 16)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor: (12, 4, 1) for shape (2, 3, 4)."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@functools.lru_cache(maxsize=1 << 16)
def whole(shape: tuple[int, ...]) -> Window:
    return window(shape, row_major(shape), 0)


@functools.lru_cache(maxsize=1 << 16)
def coalesced(inner: Window) -> Window:
    """Merge dims of a window where possible, without changing the elements or their order.

    For example, row-major shape (2, 3) becomes (6,).
    """
    if 0 in inner.shape:
        return window((0,), (0,), 0)
    dims: list[tuple[int, int]] = []
    for size, stride in zip(inner.shape, inner.strides, strict=True):
        # Such a dim selects no further element, whatever its stride.
        if size == 1:
            continue
        # A step along the outer dim is as long as the whole inner dim.
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return Window(tuple(n for n, _ in dims), tuple(s for _, s in dims), inner.offset)


@functools.lru_cache(maxsize=1 << 16)
def composed(inner: Window, outer: Window) -> Window | None:
    """Return the window that selects from a tensor what `outer` selects from the result of `inner`.

    For example, `x[2:8]` followed by `[1:3]` is the window `x[3:5]`. None if there is no such window.
    """
    # The number of an element of `inner` is written in digits, one per dim, like hours, minutes and seconds. A step
    # along a dim of `outer` adds to each digit. As long as no digit overflows into the next, the element's offset is
    # linear in the digits, and a window exists.
    if 0 in outer.shape:
        return outer
    inner = coalesced(inner)
    weights = row_major(inner.shape)

    def digits(number: int) -> list[int]:
        found = []
        for weight in weights:
            digit, number = divmod(number, weight)
            found.append(digit)
        return found

    steps = [digits(stride) for stride in outer.strides]
    start = digits(outer.offset)
    for dim, size in enumerate(inner.shape):
        reach = start[dim] + sum((n - 1) * step[dim] for n, step in zip(outer.shape, steps, strict=True))
        # A digit overflows: the next larger digit would change, so offsets are no longer linear.
        if reach >= size:
            return None

    def distance(counts: list[int]) -> int:
        return sum(count * stride for count, stride in zip(counts, inner.strides, strict=True))

    return window(outer.shape, [distance(step) for step in steps], inner.offset + distance(start))


def joined(first: Window, second: Window, dim: int) -> Window | None:
    """Return the window that selects the elements of two windows on the same tensor, concatenated along `dim`.

    For example, x[:2] and x[2:5] along dim 0 become x[:5]. None if no window selects these elements in this order.
    """
    sizes = first.shape[dim], second.shape[dim]
    others = [d for d in range(len(first.shape)) if d != dim]
    if any((first.shape[d], first.strides[d]) != (second.shape[d], second.strides[d]) for d in others):
        return None
    # The first window ends where the second begins, so the distance is the first's size times the common stride.
    distance = second.offset - first.offset
    # No integer stride spans the distance.
    if distance % sizes[0]:
        return None
    stride = distance // sizes[0]
    if stride < 0 or any(n > 1 and x.strides[dim] != stride for n, x in zip(sizes, (first, second), strict=True)):
        return None
    shape = tuple(sum(sizes) if d == dim else n for d, n in enumerate(first.shape))
    return window(shape, [stride if d == dim else s for d, s in enumerate(first.strides)], first.offset)


class Piece(NamedTuple):
    """A window on a single part of a concatenation; `part` is the index of this part."""

    part: int
    window: Window


def cut(outer: Window, parts: Sequence[Sequence[int]], dim: int) -> tuple[int | None, list[Piece]] | None:
    """Split a window on a concatenation along `dim` into windows on the concatenated parts.

    `parts` has the shapes of these parts. Returns None if the window cannot be split, otherwise (along, pieces):

    - `pieces`: the windows on the parts. Concatenated along dim `along`, they have the elements of `outer`.
    - `along`: None if `outer` is within a single part, so that `pieces` has only one window.
    """
    # In row-major order, elements come in blocks, one for each index of the dims before `dim`. Within a block, part
    # follows part. A dim of the window either moves from block to block or stays within a block.
    after = math.prod(parts[0][dim + 1 :])
    sizes = [shape[dim] * after for shape in parts]
    bounds = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    block = bounds[-1]
    if 0 in outer.shape or not block:
        return None
    # A stride that is a multiple of `block` moves from block to block, any other within a block.
    hops = [stride // block if stride % block == 0 else 0 for stride in outer.strides]
    steps = [0 if stride % block == 0 else stride for stride in outer.strides]
    first_block, start = divmod(outer.offset, block)
    reach = [(n - 1) * step for n, step in zip(outer.shape, steps, strict=True)]
    # The window would run into the next block, where the parts begin again.
    if start + sum(reach) >= block:
        return None

    def piece(part: int, shape: Sequence[int], begin: int) -> Piece:
        strides = [hop * sizes[part] + step for hop, step in zip(hops, steps, strict=True)]
        return Piece(part, window(shape, strides, first_block * sizes[part] + begin - bounds[part]))

    first = bisect.bisect_right(bounds, start) - 1
    if start + sum(reach) < bounds[first + 1]:
        return None, [piece(first, outer.shape, start)]
    # At most one dim may cross from part to part: those with longer steps are tried first.
    for along in sorted((d for d, step in enumerate(steps) if step), key=lambda d: -steps[d]):
        pieces = _cut_along(outer.shape[along], steps[along], start, sum(reach) - reach[along], bounds)
        if pieces is not None:
            shapes = [tuple(count if d == along else n for d, n in enumerate(outer.shape)) for _, _, count in pieces]
            return along, [piece(part, shape, begin) for (part, begin, _), shape in zip(pieces, shapes, strict=True)]
    return None


def _cut_along(
    size: int, step: int, start: int, others: int, bounds: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """Divide the indices of a dim of a window among the parts of a concatenation.

    Returns (part, number of the first element, number of indices) for each part. Returns None if the elements at a
    single index of this dim are in several parts.

    - `size`, `step`: the size and stride of the dim.
    - `start`: the element number of index 0.
    - `others`: the distance, in elements, that the window's other dims cover.
    - `bounds`: the element numbers at which the parts begin and end.
    """
    found, index = [], 0
    for part, bound in enumerate(bounds[1:]):
        end = min(size, max(index, -((start - bound) // step)))  # the first index that starts at or after the bound
        if end > index:
            if start + (end - 1) * step + others >= bound:
                return None
            found.append((part, start + index * step, end - index))
        index = end
    return found
