"""Windows on tensors, the checker's own arithmetic: (shape, strides, offset) over elements in row-major order.

A window shows, at index i, element number offset + sum(i_k * stride_k). Its one form has stride 0 where a dim has size
1, and nothing but zeros where it has no elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any

Window = tuple[tuple[int, ...], tuple[int, ...], int]


def normal(shape: Sequence[int], strides: Sequence[int], offset: int) -> Window:
    """A window in its one form."""
    if prod(shape) == 0:
        return tuple(shape), tuple(0 for _ in shape), 0
    return tuple(shape), tuple(s * (n > 1) for n, s in zip(shape, strides, strict=True)), offset


def steps_of(shape: Sequence[int]) -> tuple[int, ...]:
    """How many elements apart neighbours along each dim are."""
    return tuple(accumulate(shape[:0:-1], lambda a, b: a * b, initial=1))[::-1] if shape else ()


def full(shape: Sequence[int]) -> Window:
    """All elements of a tensor, in their order."""
    return normal(shape, steps_of(shape), 0)


def flat(w: Window) -> Window:
    """The same elements in the same order, with dims merged wherever one goes on where the other ends."""
    shape, strides, offset = w
    if prod(shape) == 0:
        return (0,), (0,), 0
    merged: list[list[int]] = []
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if merged and merged[-1][1] == n * s:
            merged[-1] = [merged[-1][0] * n, s]
        else:
            merged.append([n, s])
    return tuple(n for n, _ in merged), tuple(s for _, s in merged), offset


def within(inner: Window, outer: Window) -> Window | None:
    """What `outer` shows of what `inner` shows, if that is a window on what `inner` looks at."""
    if prod(outer[0]) == 0:
        return normal(*outer)
    shape, strides, offset = flat(inner)
    room = list(shape)  # how far each dim can still be walked
    moves = []
    for length, number in [(2, outer[2]), *zip(outer[0], outer[1], strict=True)]:
        move = 0
        for dim, weight in enumerate(steps_of(shape)):
            index, number = divmod(number, weight)
            room[dim] -= (length - 1) * index
            move += index * strides[dim]
        if number:
            return None
        moves.append(move)
    if any(left < 1 for left in room):
        return None
    return normal(outer[0], moves[1:], offset + moves[0])


def follows(first: Window, second: Window, dim: int) -> Window | None:
    """Two windows on one tensor as one, the second after the first along `dim`, if that is a window."""
    (shape, strides, offset), (other_shape, other_strides, other_offset) = first, second
    size, more = shape[dim], other_shape[dim]
    stride, rest = divmod(other_offset - offset, size)
    for d in range(len(shape)):
        if d != dim and (shape[d] != other_shape[d] or strides[d] != other_strides[d]):
            return None
    if rest or stride < 0 or (size > 1 and strides[dim] != stride) or (more > 1 and other_strides[dim] != stride):
        return None
    return normal(_with(shape, dim, size + more), _with(strides, dim, stride), offset)


def pieces(
    w: Window, parts: Sequence[Sequence[int]], dim: int
) -> Iterator[tuple[int | None, list[tuple[int, Window]]]]:
    """The ways to show a window on a concatenation as windows on its parts, along each dim that can be cut, or along
    None where it lies within one part. A piece is a part's place and the window on it."""
    shape, strides, offset = w
    lengths = [prod(part[dim:]) for part in parts]
    ends = list(accumulate(lengths))
    block = ends[-1]
    inner = [s % block and s for s in strides]  # steps within a block of all parts; others go from block to block
    if any(s % block and s >= block for s in strides):
        return
    start, reach = offset % block, sum((n - 1) * s for n, s in zip(shape, inner, strict=True))
    if start + reach >= block:
        return

    def on(part: int, extent: Sequence[int], begin: int) -> tuple[int, Window]:
        length, first = lengths[part], ends[part] - lengths[part]
        own = [step or stride // block * length for stride, step in zip(strides, inner, strict=True)]
        return part, normal(extent, own, offset // block * length + begin - first)

    holder = next(place for place, end in enumerate(ends) if start < end)
    if start + reach < ends[holder]:
        yield None, [on(holder, shape, start)]
    for along, step in enumerate(inner):
        if not step or shape[along] == 1:
            continue
        tail = reach - (shape[along] - 1) * step
        found, index = [], 0
        for place, end in enumerate(ends):
            stop = min(shape[along], max(index, (end - tail - start + step - 1) // step))  # the last fits with its tail
            if stop > index and start + index * step >= end - lengths[place]:
                found.append(on(place, _with(shape, along, stop - index), start + index * step))
                index = stop
        if index == shape[along]:
            yield along, found


RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
VIEWS = {
    "aten.view.default": "size",
    "aten._unsafe_view.default": "size",
    "aten.reshape.default": "shape",
    "aten.expand.default": "size",
    "aten.t.default": "",
    "aten.permute.default": "dims",
    "aten.transpose.int": "dim0 dim1",
    "aten.squeeze.default": "",
    "aten.squeeze.dim": "dim",
    "aten.squeeze.dims": "dim",
    "aten.unsqueeze.default": "dim",
    "aten.slice.Tensor": "dim start end step",
    "aten.select.int": "dim index",
    "aten.unbind.int": "dim",
    "aten.split.Tensor": "split_size dim",
    "aten.split_with_sizes.default": "split_sizes dim",
    "aten.split_with_sizes_copy.default": "split_sizes dim",
}
"""Operators that show elements of `self`, and the names of their other arguments."""


def view_of(op: str, shape: Sequence[int], args: Any, result: Sequence[int]) -> list[Window]:
    """What an operator of VIEWS shows of a contiguous tensor. Raises ValueError where it cannot."""
    steps, rank = list(steps_of(shape)), len(shape)

    def kept(order: Sequence[int]) -> list[Window]:
        return [normal([shape[d] for d in order], [steps[d] for d in order], 0)]

    def cut(dim: int, sizes: Sequence[int]) -> list[Window]:
        begins = accumulate(sizes, initial=0)
        return [normal(_with(shape, dim, n), steps, b * steps[dim]) for n, b in zip(sizes, begins, strict=False)]

    fits = set(args) - {"self"} <= set(VIEWS[op].split())
    match op.removeprefix("aten."):
        case "view.default" | "_unsafe_view.default" | "reshape.default":
            given = args["size" if op != "aten.reshape.default" else "shape"]
            fits = fits and prod(result) == prod(shape) and _is_said(given, result)
            shown = [full(result)]
        case "expand.default":
            lead = len(result) - rank
            own = [0 if n == 1 else s for n, s in zip(shape, steps, strict=True)]
            fits = fits and all(n in (1, m) for n, m in zip(shape, result[lead:], strict=True))
            fits = fits and _is_said(args["size"], result)
            shown = [normal(result, [0] * lead + own, 0)]
        case "t.default":
            shown = kept(range(rank)[::-1])
        case "permute.default":
            shown = kept([within_range(d, rank) for d in args["dims"][1:]])
        case "transpose.int":
            order = list(range(rank))
            one, two = within_range(args["dim0"], rank), within_range(args["dim1"], rank)
            order[one], order[two] = two, one
            shown = kept(order)
        case "squeeze.default" | "squeeze.dim" | "squeeze.dims":
            dims = args.get("dim", ("list", *range(rank)))
            chosen = {within_range(d, rank) for d in (dims[1:] if isinstance(dims, tuple) else [dims])}
            shown = kept([d for d in range(rank) if d not in chosen or shape[d] != 1])
        case "unsqueeze.default":
            dim = within_range(args["dim"], rank + 1)
            shown = [full((*shape[:dim], 1, *shape[dim:]))]
        case "slice.Tensor":
            dim, step = within_range(args.get("dim", 0), rank), args.get("step", 1)
            start, end, _ = slice(_number(args, "start"), _number(args, "end")).indices(shape[dim])
            size = max(0, -((start - end) // step))
            shown = [normal(_with(shape, dim, size), _with(steps, dim, steps[dim] * step), start * steps[dim])]
        case "select.int":
            dim = within_range(args["dim"], rank)
            shown = [
                normal(_without(shape, dim), _without(steps, dim), within_range(args["index"], shape[dim]) * steps[dim])
            ]
        case "unbind.int":
            dim = within_range(args.get("dim", 0), rank)
            shown = [normal(_without(shape, dim), _without(steps, dim), i * steps[dim]) for i in range(shape[dim])]
        case "split.Tensor":
            dim, size = within_range(args.get("dim", 0), rank), args["split_size"]
            shown = cut(dim, [min(size, shape[dim] - begin) for begin in range(0, shape[dim], size)])
        case "split_with_sizes.default" | "split_with_sizes_copy.default":
            shown = cut(within_range(args.get("dim", 0), rank), args["split_sizes"][1:])
        case _:
            raise ValueError(f"{op} is no view")
    if not fits:
        raise ValueError(f"{op} gives another shape")
    return shown


def within_range(index: int, size: int) -> int:
    """An index, which may count from the end, counted from the beginning. Raises ValueError for one beyond either."""
    if not -size <= index < size:
        raise ValueError(f"{index} is no index of {size}")
    return index % size


def broadcast(shape: Sequence[int], result: Sequence[int]) -> Window:
    """A tensor repeated along dims of size 1, as operands of one operator are."""
    return view_of("aten.expand.default", shape, {"size": ("list", *result)}, result)[0]


def _is_said(given: Sequence[Any], result: Sequence[int]) -> bool:
    """Whether a shape is what was asked for, where -1 leaves it open."""
    kind, *sizes = given
    return (
        kind == "list" and len(sizes) == len(result) and all(n in (-1, m) for n, m in zip(sizes, result, strict=True))
    )


def _with(values: Sequence[int], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _without(values: Sequence[int], place: int) -> tuple[int, ...]:
    return (*values[:place], *values[place + 1 :])


def _number(args: Any, name: str) -> int | None:
    value = args.get(name)
    return None if value is None or value == ("none",) else int(value)
