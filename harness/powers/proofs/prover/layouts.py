"""Computes with memory layouts: alignment, overlapping elements, and the elements that a view operator selects."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.known_operators import RESHAPES, SPLIT
from bitproof.harness.powers.proofs.prover.proof_data import Call, Tensor, nodes_in
from bitproof.harness.powers.proofs.prover.windows import Window, row_major, whole, window


def line_of(device: str) -> int:
    """Return the alignment in bytes of memory that torch allocates. No kernel depends on a larger alignment."""
    # cuBLASLt may choose a kernel by the alignment of its operands, which torch passes to it, up to 256 bytes
    # (`aten/src/ATen/cuda/CUDABlas.cpp`). So a bfloat16 matrix that starts 64 elements into a bucket in GPU memory may
    # get another kernel than at the bucket's start.
    return 256 if device.startswith("cuda") else 64


_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
"""Bytes per element. For any other dtype, alignment is counted in elements instead of bytes, which is stricter."""


def alignment_of(dtype: str, offset: int, device: str) -> int:
    """Return by how many bytes the address of a tensor's first element exceeds a multiple of `line_of(device)`.

    `offset` is the tensor's offset in its storage, in elements. For example, a float32 tensor at offset 3 on the CPU
    has alignment 12.
    """
    return offset * _ITEM_BYTES.get(dtype, 1) % line_of(device)


def overlaps(x: Tensor) -> bool:
    """Return whether two indices of a tensor may refer to the same element in memory, as in `x.expand(3, 4)`.

    Also True if a size or stride depends on data, since an overlap cannot be ruled out then. The only exception is the
    first size of a contiguous tensor.
    """
    if any(not isinstance(n, int) for n in (*x.shape, *x.strides)):
        return not _is_dense(x)
    # From the innermost dim to the outermost, each stride must be larger than the distance between the first and the
    # last element of all dims before it.
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _is_dense(x: Tensor) -> bool:
    inner = x.shape[1:]
    if not all(isinstance(n, int) for n in inner) or not all(isinstance(s, int) for s in x.strides):
        return False
    # The first size has no effect on row-major strides, so it may depend on data.
    return x.strides == row_major((1, *inner))


def expanded(shape: tuple[int, ...], to: tuple[int, ...]) -> Window:
    """Return the window that broadcasts a tensor of `shape` to shape `to`: (3,) to (2, 3) has strides (0, 1)."""
    strides = [0 if n == 1 else s for n, s in zip(shape, row_major(shape), strict=True)]
    return window(to, [0] * (len(to) - len(shape)) + strides, 0)


def shows(call: Call, calls: Sequence[Call]) -> bool:
    """Return whether a call only selects elements of its first argument, as `transpose`, `split` and `reshape` do.

    The result may be a view or a copy. False for a view of complex numbers as real numbers, or the reverse.
    """
    if call.writes or call.op == "getitem" or not call.results or not call.reads:
        return False
    x = calls[call.reads[0]].value
    is_copy = call.op in (*RESHAPES, SPLIT)
    is_view = isinstance(x, Tensor) and all(x.storage == y.storage for y in call.results)
    # A view as any other dtype counts, and is refused later.
    return isinstance(x, Tensor) and (is_copy or (is_view and not _is_paired(x, call.results)))


def _is_paired(x: Tensor, results: Sequence[Tensor]) -> bool:
    # A view of complex numbers as real numbers, or the reverse.
    return all({x.dtype, y.dtype} in ({"complex64", "float32"}, {"complex128", "float64"}) for y in results)


def without_redundant_arguments(call: Call, calls: Sequence[Call]) -> Call:
    """Remove those arguments of a call that follow from the layouts of its tensors, so that equivalent calls are equal.

    For example, `prims.split_dim(a, 0, 2)` becomes `view(self)`, as does any other call that returns the same view.
    """
    tensors = [x for read in call.reads for x in calls[read].results] + call.results
    kept = dict(call.args)
    if call.op in known.COPIES:
        source, own = tensors
        gone = ["layout", "memory_format", "pin_memory"]
        # A cast between floats is an exact term with its own dtype, so the argument is redundant there, too.
        gone += ["dtype"] if source.dtype == own.dtype or {source.dtype, own.dtype} <= known.FLOATS else []
        gone += ["device", "non_blocking"] if source.device == own.device else []
        kept = {name: x for name, x in call.args if name not in gone}
    elif call.op in known.FILLS and known.number_filled(call) is not None:
        kept = {name: x for name, x in call.args if name in (*call.writes, known.FILLS[call.op])}
    elif shows(call, calls) and call.op not in known.WAITS and all(x.is_closed for x in tensors):
        # The layouts already state which elements a view selects: `dim`, `start` and the like say it a second time.
        kept = {name: x for name, x in call.args if nodes_in(x) or (name == "dim" and call.op == known.SPLIT)}
        if tensors[0].storage == call.results[0].storage:
            shown, *others = (("node", read) for read in call.reads)
            kept = {"self": shown, **({"others": ("list", *others)} if others else {})}
            call = replace(call, op=known.VIEW)
    # So that -1 and the index of the last dim are the same argument.
    if call.op in (*known.JOINS, known.SPLIT) and "dim" in kept:
        kept["dim"] %= len(call.results[0].shape)
    return replace(call, args=tuple(kept.items()))


def windows_of(call: Call, x: Tensor) -> list[Window | None]:
    """Return, for each result of a call, the window on `x` that the call selects; None for a result that is no window.

    `x` is the call's first argument, all sizes must be numbers, and `shows` must be True for the call.
    """
    if call.op == SPLIT:
        dim = dict(call.args).get("dim", 0)
        ends = list(itertools.accumulate((y.shape[dim] for y in call.results), initial=0))
        steps = row_major(x.shape)
        return [window(y.shape, steps, end * steps[dim]) for y, end in zip(call.results, ends, strict=False)]
    if call.results[0].storage != x.storage:
        return [whole(call.value.shape)]
    return [
        _window_on_tensor(x.shape, x.strides, window(y.shape, y.strides, y.offset - x.offset)) for y in call.results
    ]


@functools.lru_cache(maxsize=1 << 16)
def _window_on_tensor(shape: tuple[int, ...], strides: tuple[int, ...], memory: Window) -> Window | None:
    """Convert a window on memory into a window on a tensor in that memory. None if the window reaches other memory.

    - `shape`, `strides`: the layout of the tensor.
    - `memory`: the window, with addresses counted from the tensor's first element.

    For example, a transposed matrix has shape (2, 3) and strides (1, 2). The element at address 2 is element number 1
    of the matrix in row-major order.
    """
    if 0 in memory.shape:
        return memory
    if 0 in shape or memory.offset < 0:
        return None
    # Dims that follow each other in memory without a gap count as a single dim.
    dims: list[list[int]] = []  # size, stride in memory, stride in row-major order
    for size, apart, step in zip(shape, strides, row_major(shape), strict=True):
        if dims and dims[-1][1:] == [size * apart, size * step]:
            dims[-1] = [dims[-1][0] * size, apart, step]
        elif size > 1 and apart:
            dims.append([size, apart, step])
    # An address is written as a number whose digits are the indices in the dims. Larger weights come first.
    dims.sort(key=lambda dim: -dim[1])
    # `places` has the same numbers with the weights of the row-major order. They fit if no sum of digits carries: at
    # the window's last element, `reach` is below the size of each dim.
    reach, places = [0] * len(dims), []
    for count, address in [
        (1, memory.offset),
        *((n - 1, s) for n, s in zip(memory.shape, memory.strides, strict=True)),
    ]:
        place = 0
        for dim, (_, apart, step) in enumerate(dims):
            digit, address = divmod(address, apart)
            reach[dim] += count * digit
            place += digit * step
        # The address is between elements, or outside this tensor.
        if address:
            return None
        places.append(place)
    if any(far >= size for far, (size, _, _) in zip(reach, dims, strict=True)):
        return None
    return window(memory.shape, places[1:], places[0])
