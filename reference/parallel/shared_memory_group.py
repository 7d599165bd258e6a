"""A process group for ranks on the same machine, which exchange data through shared memory and sum in rank order.

- A launch writes this rank's data, and a wait reads the data of the others. Once all ranks have launched a collective,
  each can finish it alone.
- All ranks launch a group's collectives in the same order, as with any backend.
- Shared memory is divided into slots, each for a collective. If all are in use, a launch first finishes the group's
  oldest collective. A wait also finishes all earlier collectives of the group.
- A message that is too large for a slot is copied by the launch, and exchanged in pieces during the wait.
- A slot begins with a header: the called collective, dtype, shape, and the bytes for each rank. If ranks disagree, they
  raise an error that names both calls.

Sums add the same parts in the same order as `RankOrderGroup`, so the bits are the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from bitproof.harness.shared_memory import BULK_BYTES, INLINE_BYTES, Ring
from bitproof.harness.within_user_code import refused
from bitproof.reference.parallel.rank_order_group import RankOrderGroup, copy_if_shared, to_host

# W ranks of the group; N elements of one rank's part

_LINE = 64
_CALL_BYTES = 112
_HASH_BYTES = 16
_GATHER, _SCATTER, _EXCHANGE = 1, 2, 3
"""Kinds of sent data: the same part to all ranks; a part of equal size to each rank; a part of any
size to each rank.
"""
_MAX_VIEWS = 4096

Receive = Callable[[Sequence[int], Sequence[int], int], None]
"""Receives a piece of every rank's data: (offset of each rank's bytes in the memory, their numbers, bytes received
before).
"""


class SharedMemoryGroup(RankOrderGroup):
    """The collectives of `RankOrderGroup`, through shared memory.

    `rings` are two parts of the memory, each with slots: the first for small messages, the second for pieces of large
    messages.
    """

    def __init__(self, gloo: dist.ProcessGroup, rings: tuple[Ring, Ring]) -> None:
        super().__init__(gloo)
        self.index, self.num_ranks = gloo.rank(), gloo.size()
        self.inline, self.bulk = rings
        self.memory = self.inline.memory
        # A header has the collective's number, the digest and text of its call, and the number of bytes for each rank.
        self.header = struct.Struct(f"<Q{_HASH_BYTES}s{_CALL_BYTES}s{self.num_ranks}Q")
        self.header_bytes = -(-self.header.size // _LINE) * _LINE
        # Launched, but not complete; the oldest comes first.
        self.under_way: deque[_Exchange] = deque()
        self.rows = functools.lru_cache(_MAX_VIEWS)(self._rows)
        self._views: dict[torch.dtype, Tensor] = {}

    def _all_to_all(self, output: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Work:
        sent, received = (
            _bytes_of_parts(x, input_splits, self.size()),
            _bytes_of_parts(output, output_splits, self.size()),
        )
        target = _host_target(output)
        call = _call_of("all_to_all", x.dtype, x.shape[1:], True)
        return self._launch(_EXCHANGE, call, x, sent, received, _copying(self, target, received), output, target)

    def _all_gather(self, output: Tensor, x_N: Tensor) -> Work:
        sizes, target = [x_N.nbytes] * self.num_ranks, _host_target(output)
        call = _call_of("all_gather", x_N.dtype, x_N.shape)
        return self._launch(_GATHER, call, x_N, sizes, sizes, _copying(self, target, sizes), output, target)

    def _reduce_scatter(self, output_N: Tensor, x: Tensor) -> Work:
        sizes, target = [output_N.nbytes] * self.num_ranks, _host_target(output_N)
        call = _call_of("reduce_scatter", x.dtype, x.shape)
        return self._launch(_SCATTER, call, x, sizes, sizes, _summing(self, target), output_N, target)

    def _all_reduce(self, x: Tensor) -> Work:
        sizes, target = [x.nbytes] * self.num_ranks, _host_target(x)
        call = _call_of("all_reduce", x.dtype, x.shape)
        return self._launch(_GATHER, call, x, sizes, sizes, _summing(self, target), x, target)

    def _launch(
        self,
        kind: int,
        call: _Call,
        x: Tensor,
        sent: list[int],
        received: list[int],
        receive: Receive,
        output: Tensor,
        target: Tensor,
    ) -> Work:
        finish = None if target is output else lambda: output.copy_(target)
        # The oldest collective must free its slot first.
        if self.inline.is_full:
            self.under_way.popleft().complete()
        exchange = _Exchange(self, kind, call, to_host(x), sent, received, receive, finish, x)
        self.under_way.append(exchange)
        return exchange

    def _rows(self, dtype: torch.dtype, at: int, stride: int, count: int) -> Sequence[Tensor]:
        """Return a tensor in shared memory for each rank, of `count` elements.

        The elements of the first rank begin at byte `at`, and those of each further rank `stride` bytes later.
        """
        if dtype not in self._views:
            self._views[dtype] = torch.frombuffer(self.memory.map, dtype=dtype)
        view, itemsize = self._views[dtype], dtype.itemsize
        return view.as_strided((self.num_ranks, count), (stride // itemsize, 1), at // itemsize).unbind(0)


class _Exchange(Work):
    """The async handle of a collective. Creating it writes the header into a slot, and the data if they fit.

    - `x`: the input `given`, contiguous and on the host.
    - `sent`, `received`: the numbers of bytes that this rank sends to, and receives from, each rank.
    """

    def __init__(
        self,
        group: SharedMemoryGroup,
        kind: int,
        call: _Call,
        x: Tensor,
        sent: list[int],
        received: list[int],
        receive: Receive,
        finish: Callable[[], Any] | None,
        given: Tensor,
    ) -> None:
        super().__init__()
        self._group, self._kind, self._sent, self._received = group, kind, sent, received
        self._receive, self._finish = receive, finish
        self._x: Tensor | None = x
        self._number = group.inline.posted
        self._call = call
        self._header = group.header.pack(self._number, call.digest, call.text, *sent)
        self._is_inline = self._fits(sent)
        at = group.inline.begin_post()
        group.memory.map[at : at + len(self._header)] = self._header
        if self._is_inline:
            self._write(at + group.header_bytes, 0, x.nbytes)
        else:
            # It is sent during the wait, and the caller may have overwritten `given` by then.
            self._x = copy_if_shared(x, given)
        group.inline.end_post()

    def wait(self, timeout: Any = None) -> bool:
        # The group's earlier collectives come first.
        # `_x` is None when this collective is complete.
        while self._x is not None:
            self._group.under_way.popleft().complete()
        return True

    def complete(self) -> None:
        """Receive the data of all ranks. Messages that are too large for a slot are exchanged in pieces."""
        group, ring = self._group, self._group.inline
        first = ring.begin_read()
        if self._is_inline and self._are_headers_mine(first):  # nearly always, and cheaper than comparing each size
            skipped = 0 if self._kind == _GATHER else group.index * self._sent[0]
            places = range(first + group.header_bytes + skipped, first + group.num_ranks * ring.stride, ring.stride)
            self._receive(places, self._received, 0)
            ring.end_read()
            self._end()
            return
        sent_by = self._read_headers(first)
        is_inline = [self._fits(sent) for sent in sent_by]
        # In a gather each message is for all ranks; otherwise the parts for lower ranks come first in it.
        if any(is_inline):
            at = first + group.header_bytes
            skipped = 0 if self._kind == _GATHER else group.index
            offsets = [at + i * ring.stride + sum(sent[:skipped]) for i, sent in enumerate(sent_by)]
            sizes = self._received
            if not all(is_inline):
                sizes = [size if here else 0 for size, here in zip(sizes, is_inline, strict=True)]
            self._receive(offsets, sizes, 0)
        ring.end_read()
        if not all(is_inline):
            self._exchange_pieces([sent for sent, here in zip(sent_by, is_inline, strict=True) if not here], is_inline)
        self._end()

    def _end(self) -> None:
        self._x = None
        if self._finish is not None:
            self._finish()

    def _fits(self, sent: Sequence[int]) -> bool:
        total = sent[0] if self._kind == _GATHER else sum(sent)
        return total <= INLINE_BYTES - self._group.header_bytes

    def _are_headers_mine(self, first: int) -> bool:
        """Whether all ranks' headers equal this rank's: the same collective, with the same numbers of bytes.

        `first` is the offset of the first rank's slot. Always False for an all-to-all.
        """
        # In an all-to-all ranks send different sizes, so their headers differ.
        if self._kind == _EXCHANGE:
            return False
        memory, header, length = self._group.memory.map, self._header, len(self._header)
        stride = self._group.inline.stride
        return all(
            [memory[at : at + length] == header for at in range(first, first + len(self._sent) * stride, stride)]
        )

    def _read_headers(self, first: int) -> list[Sequence[int]]:
        """Return, for each rank, the numbers of bytes that it sends to every rank.

        `first` is the offset of the first rank's slot. Raises RuntimeError if ranks call different collectives or
        disagree on the number of bytes.
        """
        if self._are_headers_mine(first):
            return [self._sent] * self._group.num_ranks
        group, memory = self._group, self._group.memory.map
        places = range(first, first + group.num_ranks * group.inline.stride, group.inline.stride)
        sent_by: list[Sequence[int]] = []
        for index, at in enumerate(places):
            number, digest, text, *sent = group.header.unpack_from(memory, at)
            # Number and digest identify a call; the text is for the error.
            if (number, digest) != (self._number, self._call.digest):
                other = text.rstrip(b"\0").decode(errors="replace")
                raise self._disagreement(index, f"calls {self._call.description}", f"calls {other}")
            if sent[group.index] != self._received[index]:
                expected = f"expects {self._received[index]} bytes of rank {group.inline.ranks[index]}"
                raise self._disagreement(index, f"{expected} in {self._call.description}", f"sends {sent[group.index]}")
            sent_by.append(sent)
        return sent_by

    def _disagreement(self, index: int, mine: str, others: str) -> RuntimeError:
        ranks = self._group.inline.ranks
        return refused(
            RuntimeError(
                f"ranks disagree on collective {self._number} of ranks {list(ranks)}: "
                f"rank {ranks[self._group.index]} {mine}, rank {ranks[index]} {others}"
            )
        )

    def _exchange_pieces(self, sent_by: list[Sequence[int]], is_inline: list[bool]) -> None:
        """Exchange the large messages in pieces.

        - `sent_by`: for each rank with a large message, the numbers of bytes that it sends to every rank.
        - `is_inline`: for each rank, whether its message was small, and has been received already.
        """
        group, ring, me = self._group, self._group.bulk, self._group.index
        # In a gather a piece is for all ranks; otherwise it has a part for each rank, and this rank reads part `mine`.
        num_parts, mine = (1, 0) if self._kind == _GATHER else (group.num_ranks, me)
        piece = BULK_BYTES // num_parts // _LINE * _LINE
        # Every rank takes as many slots as the largest part of any rank needs.
        num_pieces = -(-max(map(max, sent_by)) // piece)

        # Ranks with small messages post empty pieces, so that all ranks use the same slots.
        def post(index: int) -> None:
            at, start = ring.begin_post(), index * piece
            for part in range(0 if is_inline[me] else num_parts):
                self._write(at + part * piece, start, min(piece, self._sent[part] - index * piece))
                start += self._sent[part]
            ring.end_post()

        for index in range(min(ring.num_slots, num_pieces)):
            post(index)
        for index in range(num_pieces):
            if 0 < index <= num_pieces - ring.num_slots:
                post(index - 1 + ring.num_slots)  # into the previous slot, which most ranks have read by now
            first, done = ring.begin_read() + mine * piece, index * piece
            left = [0 if here else size - done for size, here in zip(self._received, is_inline, strict=True)]
            offsets = [first + i * ring.stride for i in range(group.num_ranks)]
            self._receive(offsets, [max(0, min(piece, size)) for size in left], done)
            ring.end_read()

    def _write(self, at: int, start: int, count: int) -> None:
        if count > 0:
            assert self._x is not None, "it is not complete"
            ctypes.memmove(self._group.memory.address + at, self._x.data_ptr() + start, count)


class _Call(NamedTuple):
    """A description of a collective's call, which must be the same on all ranks.

    - `description`: operator, dtype and shape, such as "all_reduce of float32[8, 64]".
    - `text`: the beginning of the description, cut to fit in a header.
    - `digest`: the digest of the whole description.
    """

    description: str
    text: bytes
    digest: bytes


@functools.lru_cache(_MAX_VIEWS)
def _call_of(operator: str, dtype: torch.dtype, shape: Sequence[int], of_rows: bool = False) -> _Call:
    """Describe a call of a collective, to compare it with the other ranks' calls.

    With `of_rows`, ranks may differ in dim 0. Then pass `shape` without dim 0; the description shows "rows" for it, as
    in "all_to_all of float32[rows, 64]".
    """
    sizes = ", ".join([*(["rows"] if of_rows else []), *map(str, shape)])
    text = f"{operator} of {str(dtype).removeprefix('torch.')}[{sizes}]"
    return _Call(text, text.encode()[:_CALL_BYTES], hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest())


def _copying(group: SharedMemoryGroup, target: Tensor, received: list[int]) -> Receive:
    """Return a function that copies a piece of each rank's part into `target`, which has the parts in rank order.

    `received` are the sizes of the whole parts in bytes.
    """
    source = group.memory.address

    def receive(offsets: Sequence[int], sizes: Sequence[int], done: int) -> None:
        to = target.data_ptr() + done
        for at, size, whole in zip(offsets, sizes, received, strict=True):
            if size:
                ctypes.memmove(to, source + at, size)
            to += whole

    return receive


def _summing(group: SharedMemoryGroup, target: Tensor) -> Receive:
    """Return a function that sums a piece of all ranks' parts into `target`, in the order ((r0 + r1) + r2) + ...

    All parts have the same size.
    """

    def receive(offsets: Sequence[int], sizes: Sequence[int], done: int) -> None:
        itemsize = target.element_size()
        # Messages of equal size begin at the same place in each slot, so offsets are equally far apart.
        stride = offsets[1] - offsets[0] if len(offsets) > 1 else 0
        rows = group.rows(target.dtype, offsets[0], stride, sizes[0] // itemsize)
        total_N = target.view(-1)
        if sizes[0] < target.nbytes:
            total_N = total_N.narrow(0, done // itemsize, sizes[0] // itemsize)
        if len(rows) == 1:
            total_N.copy_(rows[0])
            return
        torch.add(rows[0], rows[1], out=total_N)
        for row_N in rows[2:]:
            total_N.add_(row_N)

    return receive


def _host_target(output: Tensor) -> Tensor:
    """Return the host tensor into which a collective writes: `output` itself if it is contiguous and on the host."""
    if output.device.type == "cpu" and output.is_contiguous():
        return output
    return torch.empty(output.shape, dtype=output.dtype)


def _bytes_of_parts(x: Tensor, splits: list[int], size: int) -> list[int]:
    if not splits:
        return [x.nbytes // size] * size
    row = x.nbytes // x.shape[0] if x.shape[0] else 0
    return [row * rows for rows in splits]
