"""Windows on tensors, the checker's own arithmetic: (shape, strides, offset) over elements in row-major order.

A window shows, at index i, element number offset + sum(i_k * stride_k). Its one form has stride 0 where a dim has size
1, and nothing but zeros where it has no elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

Shape = Sequence[int]
Window = tuple[tuple[int, ...], tuple[int, ...], int]


def normal(shape: Shape, strides: Sequence[int], offset: int) -> Window:
    """A window in its one form."""
    if prod(shape) == 0:
        return tuple(shape), (0,) * len(shape), 0
    return tuple(shape), tuple(s * (n > 1) for n, s in zip(shape, strides, strict=True)), offset


def steps_of(shape: Shape) -> tuple[int, ...]:
    """How many elements apart neighbours along each dim are."""
    return tuple(accumulate(shape[:0:-1], lambda a, b: a * b, initial=1))[::-1] if shape else ()


def full(shape: Shape) -> Window:
    """All elements of a tensor, in their order."""
    return normal(shape, steps_of(shape), 0)


def part(shape: Shape, dim: int, indices: range) -> Window:
    """The elements of a tensor that have one of these indices along `dim`."""
    steps = steps_of(shape)
    return normal(put(shape, dim, len(indices)), put(steps, dim, steps[dim] * indices.step), indices.start * steps[dim])


def flat(w: Window) -> Window:
    """The same elements in the same order, with dims merged wherever one goes on where the other ends."""
    shape, strides, offset = w
    if prod(shape) == 0:
        return (0,), (0,), 0
    merged: list[tuple[int, int]] = []
    for n, s in zip(shape, strides, strict=True):
        if merged and n > 1 and merged[-1][1] == n * s:
            merged[-1] = merged[-1][0] * n, s
        elif n > 1:
            merged.append((n, s))
    return tuple(n for n, _ in merged), tuple(s for _, s in merged), offset


def within(inner: Window, outer: Window) -> Window | None:
    """What `outer` shows of what `inner` shows, if that is a window on what `inner` looks at.

    Numbers of elements of `inner` are taken apart into digits, one a dim; no sum of digits may leave its dim.
    """
    if prod(outer[0]) == 0:
        return normal(*outer)
    shape, strides, offset = flat(inner)
    room, moves = list(shape), []  # how far each dim can still be walked, how far each dim of `outer` walks
    for length, number in [(2, outer[2]), *zip(outer[0], outer[1], strict=True)]:
        move = 0
        for dim, weight in enumerate(steps_of(shape)):
            index, number = divmod(number, weight)
            room[dim] -= (length - 1) * index
            move += index * strides[dim]
        if number:
            return None
        moves.append(move)
    return normal(outer[0], moves[1:], offset + moves[0]) if min(room, default=1) > 0 else None


def follows(first: Window, second: Window, dim: int) -> Window | None:
    """Two windows on one tensor as one, the second after the first along `dim`, if that is a window."""
    (shape, strides, offset), (others, other_strides, other_offset) = first, second
    stride, rest = divmod(other_offset - offset, shape[dim])
    alike = put(shape, dim, 0) == put(others, dim, 0) and put(strides, dim, 0) == put(other_strides, dim, 0)
    steps = [s for n, s in ((shape[dim], strides[dim]), (others[dim], other_strides[dim])) if n > 1]
    if rest or stride < 0 or not alike or any(s != stride for s in steps):
        return None
    return normal(put(shape, dim, shape[dim] + others[dim]), put(strides, dim, stride), offset)


VIEWS = {  # the arguments besides `self` of each operator that shows elements of `self`
    "aten.view.default": ("size",),
    "aten._unsafe_view.default": ("size",),
    "aten.reshape.default": ("shape",),
    "aten.expand.default": ("size",),
    "aten.t.default": (),
    "aten.permute.default": ("dims",),
    "aten.transpose.int": ("dim0", "dim1"),
    "aten.squeeze.default": (),
    "aten.squeeze.dim": ("dim",),
    "aten.squeeze.dims": ("dim",),
    "aten.unsqueeze.default": ("dim",),
    "aten.slice.Tensor": ("dim", "start", "end", "step"),
    "aten.select.int": ("dim", "index"),
    "aten.unbind.int": ("dim",),
    "aten.split.Tensor": ("split_size", "dim"),
    "aten.split_with_sizes.default": ("split_sizes", "dim"),
    "aten.split_with_sizes_copy.default": ("split_sizes", "dim"),
}


def shown(op: str, shape: Shape, args: Mapping[str, Any], result: Shape) -> list[Window]:
    """What an operator of VIEWS shows of a contiguous tensor. Raises ValueError where it cannot.

    `result` is the first result's shape, which reshapes and expansions leave open where they say -1.
    """
    rank, name = len(shape), op.split(".")[1]
    if not set(args) <= {"self", *VIEWS[op]}:
        raise ValueError(f"{op} has an argument that it does not take")
    if name in ("view", "_unsafe_view", "reshape", "expand"):
        said = listed(args[VIEWS[op][0]])
        if len(said) != len(result) or any(n not in (-1, m) for n, m in zip(said, result, strict=True)):
            raise ValueError(f"{op} gives another shape")
        if name == "expand":
            return [repeated(shape, result)]
        if prod(result) != prod(shape):
            raise ValueError(f"{op} gives another number of elements")
        return [full(result)]
    if name in ("t", "permute", "transpose"):
        order = list(range(rank))[:: -1 if name == "t" else 1]
        if name == "permute":
            order = [index_in(dim, rank) for dim in listed(args["dims"])]
        if name == "transpose":
            one, two = index_in(args["dim0"], rank), index_in(args["dim1"], rank)
            order[one], order[two] = two, one
        return [normal([shape[d] for d in order], [steps_of(shape)[d] for d in order], 0)]
    if name == "squeeze":
        dims = args.get("dim", ("list", *range(rank)))
        gone = {index_in(d, rank) for d in (listed(dims) if isinstance(dims, tuple) else (dims,))}
        return [full([n for d, n in enumerate(shape) if d not in gone or n != 1])]
    dim = index_in(args.get("dim", 0), rank + (name == "unsqueeze"))
    if name == "unsqueeze":
        return [full((*shape[:dim], 1, *shape[dim:]))]
    size, ranges = shape[dim], [range(shape[dim])]
    if name == "slice":
        start, end = (None if args.get(key, ("none",)) == ("none",) else args[key] for key in ("start", "end"))
        ranges = [range(size)[start : end : args.get("step", 1)]]
    elif name == "select":
        ranges = [range(size)[index_in(args["index"], size) :][:1]]
    elif name == "unbind":
        ranges = [range(i, i + 1) for i in range(size)]
    elif name == "split":
        ranges = [range(size)[i : i + args["split_size"]] for i in range(0, size, args["split_size"])]
    else:
        bounds = list(accumulate(listed(args["split_sizes"]), initial=0))
        if bounds[-1] != size:
            raise ValueError(f"parts of {bounds[-1]} in all of what has {size}")
        ranges = [range(a, b) for a, b in pairwise(bounds)]
    windows = [part(shape, dim, indices) for indices in ranges]
    if name in ("select", "unbind"):
        return [(w[0][:dim] + w[0][dim + 1 :], w[1][:dim] + w[1][dim + 1 :], w[2]) for w in windows]
    return windows


def repeated(shape: Shape, result: Shape) -> Window:
    """A tensor repeated along dims of size 1, and along new ones before them, as operands of one operator are."""
    lead = len(result) - len(shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(shape, result[lead:], strict=True)):
        raise ValueError(f"{shape} does not repeat to {result}")
    return normal(result, (0,) * lead + full(shape)[1], 0)


def listed(argument: Any) -> tuple[Any, ...]:
    """The items of an argument that is a list. Raises ValueError for any other."""
    if argument[:1] != ("list",):
        raise ValueError(f"{argument} is no list")
    return tuple(argument[1:])


def index_in(index: int, size: int) -> int:
    """An index, which may count from the end, counted from the beginning. Raises ValueError for one beyond either."""
    if not -size <= index < size:
        raise ValueError(f"{index} is no index of {size}")
    return index % size


def put(values: Sequence[int], place: int, value: int) -> tuple[int, ...]:
    """Values with one replaced."""
    return (*values[:place], value, *values[place + 1 :])
