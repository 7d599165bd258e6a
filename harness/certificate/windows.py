"""The checker's own arithmetic for windows on tensors: (shape, strides, offset) over elements in row-major order.

A window selects, at index i, element number offset + sum(i_k * stride_k). In its normal form the stride of a dim of
size 1 is 0, and an empty window has only zeros. Layers repeat, so what was computed last is kept: arguments are tuples.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, zip_longest
from math import prod

Shape = Sequence[int]
Window = tuple[tuple[int, ...], tuple[int, ...], int]

_kept = functools.lru_cache(maxsize=1 << 14)


@_kept
def normal(shape: Shape, strides: Sequence[int], offset: int) -> Window:
    """A window in normal form."""
    if prod(shape) == 0:
        return tuple(shape), (0,) * len(shape), 0
    return tuple(shape), tuple(s * (n > 1) for n, s in zip(shape, strides, strict=True)), offset


@_kept
def steps_of(shape: Shape) -> tuple[int, ...]:
    """The row-major strides of a shape."""
    return tuple(accumulate(shape[:0:-1], lambda a, b: a * b, initial=1))[::-1] if shape else ()


def full(shape: Shape) -> Window:
    """All elements of a tensor, in their order."""
    return normal(shape, steps_of(shape), 0)


def parts(w: Window, dim: int, sizes: Iterable[int]) -> list[Window]:
    """Consecutive parts of a window with these sizes along `dim`; the sizes add up to the whole dim."""
    (shape, strides, offset), ends = w, [*accumulate(sizes, initial=0)]
    pieces = ((put(shape, dim, end - start), start * strides[dim]) for start, end in pairwise(ends))
    return [normal(piece, strides, offset + begin) for piece, begin in pieces] if ends[-1] == shape[dim] else []


def repeated(shape: Shape, result: Shape) -> Window:
    """A tensor broadcast along dims of size 1 and new leading dims, like an operator's operands."""
    lead = len(result) - len(shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(shape, result[lead:], strict=True)):
        raise ValueError(f"{shape} does not repeat to {result}")
    return normal(result, (0,) * lead + full(shape)[1], 0)


def broadcast(shapes: Iterable[Shape]) -> tuple[int, ...]:
    """The broadcast shape of an operator's operands."""
    sizes = zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    return tuple(next((n for n in dim if n != 1), 1) for dim in sizes)[::-1]


def flat(w: Window) -> Window:
    """The same elements in the same order, with contiguous dims merged."""
    dims = _merged(w[0], w[1], w[1])
    return (tuple(n for n, _, _ in dims), tuple(s for _, s, _ in dims), w[2]) if prod(w[0]) else ((0,), (0,), 0)


def within(inner: Window, outer: Window) -> Window | None:
    """The composition of `outer` after `inner`, if it is a window."""
    return translated(inner[0], steps_of(inner[0]), inner[1], outer, inner[2])


@_kept
def translated(shape: Shape, weights: Shape, others: Shape, w: Window, offset: int = 0) -> Window | None:
    """Translate a window over weighted sums of indices of `shape` into one over the same indices with other weights, if
    that is a window.

    Every number that the window adds is split into indices, and no sum of indices may exceed its dim.
    """
    if prod(w[0]) == 0:
        return normal(*w)
    dims = sorted((dim for dim in _merged(shape, weights, others) if dim[1]), key=lambda dim: -dim[1])
    room, moves = [n for n, _, _ in dims], []  # the remaining extent of each dim, the extent of each dim of `w`
    for length, number in [(2, w[2]), *zip(w[0], w[1], strict=True)]:
        move = 0
        for dim, (_, weight, other) in enumerate(dims):
            index, number = divmod(number, weight)
            room[dim] -= (length - 1) * index
            move += index * other
        if number:
            return None
        moves.append(move)
    is_inside = min(room, default=1) > 0 and min(w[2], *w[0], *w[1], 0) == 0 and 0 not in shape
    return normal(w[0], tuple(moves[1:]), offset + moves[0]) if is_inside else None


def _merged(shape: Shape, ones: Shape, others: Shape) -> list[tuple[int, int, int]]:
    """Merge adjacent dims that are contiguous by both of their strides."""
    merged: list[tuple[int, int, int]] = []
    for n, a, b in zip(shape, ones, others, strict=True):
        if merged and n > 1 and merged[-1][1:] == (n * a, n * b):
            merged[-1] = merged[-1][0] * n, a, b
        elif n > 1:
            merged.append((n, a, b))
    return merged


def put(values: Sequence[int], place: int, value: int) -> tuple[int, ...]:
    """Return the values with one replaced."""
    return (*values[:place], value, *values[place + 1 :])
