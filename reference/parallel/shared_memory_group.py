"""A process group of ranks that share a machine: they meet in shared memory, and sum in ascending rank order.

A launch posts what this rank sends; waiting for it takes what the others posted. Both move data on the thread that
calls, so a collective is under way from the moment at which all ranks have launched it, whatever they compute until
they wait. Collectives of one group are launched in one order on all its ranks, as everywhere; groups know nothing of
each other. Waiting for one finishes those before it first, and where a group has `INLINE_SLOTS` under way, launching
another finishes the oldest.

A message with its header fits a slot, or it goes in pieces, each as large a part of what every rank is sent. Headers
say which collective a rank means, and how many bytes it has for whom: ranks that disagree get an error.

Sums are those of `RankOrderGroup`, over the same parts in the same order, so the bits are the same.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from harness.shared_memory import BULK_BYTES, INLINE_BYTES, Ring
from reference.parallel.rank_order_group import RankOrderGroup

# W ranks of the group; N elements of one rank's part

_LINE = 64
_GATHER, _EXCHANGE = 1, 2

Receive = Callable[[Sequence[int], Sequence[int], int], None]
"""Takes a piece: where each rank's part of it lies in the mapping, its bytes, and how many bytes came before it."""


class SharedMemoryGroup(RankOrderGroup):
    """The collectives of `RankOrderGroup`, over rings in shared memory."""

    def __init__(self, rank: int, size: int, rings: tuple[Ring, Ring]) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
        self.inline, self.bulk = rings
        self.header = struct.Struct(f"<QQ{size}Q")
        self.header_bytes = -(-self.header.size // _LINE) * _LINE
        self.under_way: deque[_Exchange] = deque()
        self._views: dict[torch.dtype, Tensor] = {}

    def _all_to_all(self, output: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Work:
        sent = [rows * _bytes_of_row(x) for rows in input_splits] or _evenly(x, self.size())
        received = [rows * _bytes_of_row(output) for rows in output_splits] or _evenly(output, self.size())
        target = _host_target(output)
        return self._launch(_EXCHANGE, x, sent, received, _copying(self, target, received), output, target)

    def _all_gather(self, output: Tensor, x_N: Tensor) -> Work:
        sizes = [x_N.nbytes] * self.size()
        target = _host_target(output)
        return self._launch(_GATHER, x_N, sizes, sizes, _copying(self, target, sizes), output, target)

    def _reduce_scatter(self, output_N: Tensor, x: Tensor) -> Work:
        target = _host_target(output_N)
        sent, received = _evenly(x, self.size()), [output_N.nbytes] * self.size()
        return self._launch(_EXCHANGE, x, sent, received, _summing(self, target), output_N, target)

    def _all_reduce(self, x: Tensor) -> Work:
        sizes, target = [x.nbytes] * self.size(), _host_target(x)
        return self._launch(_GATHER, x, sizes, sizes, _summing(self, target), x, target)

    def _launch(
        self,
        kind: int,
        x: Tensor,
        sent: list[int],
        received: list[int],
        receive: Receive,
        output: Tensor,
        target: Tensor,
    ) -> Work:
        exchange = _Exchange(self, kind, x.contiguous().cpu(), sent, received, receive)
        if target is not output:
            exchange.finish = lambda: output.copy_(target)
        if self.inline.is_full:
            self.under_way.popleft().complete()
        exchange.post()
        self.under_way.append(exchange)
        return exchange

    def view(self, dtype: torch.dtype) -> Tensor:
        """All of the mapping as elements of a dtype."""
        if dtype not in self._views:
            self._views[dtype] = torch.frombuffer(self.inline.memory.map, dtype=dtype)
        return self._views[dtype]


class _Exchange(Work):
    """One collective: `sent` and `received` are bytes for and from each rank."""

    def __init__(
        self, group: SharedMemoryGroup, kind: int, x: Tensor, sent: list[int], received: list[int], receive: Receive
    ) -> None:
        super().__init__()
        self.finish: Callable[[], Any] = lambda: None
        self._group = group
        self._kind = kind
        self._x: Tensor | None = x
        self._sent = sent
        self._received = received
        self._receive = receive
        self._number = group.inline.posted

    def wait(self, timeout: Any = None) -> bool:
        """Receive, after all collectives of the group that were launched before."""
        while self._x is not None:
            self._group.under_way.popleft().complete()
        return True

    def post(self) -> None:
        """Write the header, and the data if there is room."""
        assert self._x is not None
        group, total = self._group, self._x.nbytes
        at = group.inline.begin_post()
        group.header.pack_into(group.inline.memory.map, at, self._number, self._kind, *self._sent)
        if total <= INLINE_BYTES - group.header_bytes:
            self._write(at + group.header_bytes, 0, total)
        group.inline.end_post()

    def complete(self) -> None:
        """Receive what all ranks posted, and exchange the rest piece by piece."""
        group = self._group
        first = group.inline.begin_read()
        sent_by = self._read_headers(first)
        room = INLINE_BYTES - group.header_bytes
        parts = 1 if self._kind == _GATHER else group.size()
        piece = BULK_BYTES // parts // _LINE * _LINE
        is_inline = [sum(sent[: 1 if parts == 1 else None]) <= room for sent in sent_by]
        num_pieces = max(
            (-(-max(sent) // piece) for sent, inline in zip(sent_by, is_inline, strict=True) if not inline), default=0
        )
        if any(is_inline):
            me = group.rank() if parts > 1 else 0
            starts = [first + i * group.inline.stride + group.header_bytes for i in range(group.size())]
            offsets = [start + sum(sent[:me]) for start, sent in zip(starts, sent_by, strict=True)]
            self._receive(offsets, [n * here for n, here in zip(self._received, is_inline, strict=True)], 0)
        group.inline.end_read()
        if num_pieces:
            self._exchange_pieces(num_pieces, piece, parts, is_inline)
        self._x = None
        self.finish()

    def _read_headers(self, first: int) -> list[tuple[int, ...]]:
        """What each rank sends to each. Raises RuntimeError for ranks that mean different collectives."""
        group, sent_by = self._group, []
        for index in range(group.size()):
            at = first + index * group.inline.stride
            number, kind, *sent = group.header.unpack_from(group.inline.memory.map, at)
            if (number, kind, sent[group.rank()]) != (self._number, self._kind, self._received[index]):
                raise RuntimeError(
                    f"ranks of a group disagree: collective {self._number} of kind {self._kind} expects "
                    f"{self._received[index]} bytes from rank {index} of the group, which launched collective {number} "
                    f"of kind {kind} with {sent[group.rank()]} bytes"
                )
            sent_by.append(tuple(sent))
        return sent_by

    def _exchange_pieces(self, num_pieces: int, piece: int, parts: int, is_inline: list[bool]) -> None:
        group, ring, mine = self._group, self._group.bulk, is_inline[self._group.rank()]
        me = group.rank() if parts > 1 else 0
        ahead = ring.num_slots

        def post(index: int) -> None:
            at, start = ring.begin_post(), 0
            for part in range(0 if mine else parts):
                self._write(
                    at + part * piece, start + index * piece, max(0, min(piece, self._sent[part] - index * piece))
                )
                start += self._sent[part]
            ring.end_post()

        for index in range(min(ahead, num_pieces)):
            post(index)
        for index in range(num_pieces):
            if 0 < index <= num_pieces - ahead:  # the slot that all but the slowest have read by now
                post(index - 1 + ahead)
            first = ring.begin_read() + me * piece
            done = index * piece
            sizes = [
                0 if here else max(0, min(piece, n - done)) for n, here in zip(self._received, is_inline, strict=True)
            ]
            self._receive([first + i * ring.stride for i in range(group.size())], sizes, done)
            ring.end_read()

    def _write(self, at: int, start: int, count: int) -> None:
        """Copy bytes of what is sent to a place in the mapping."""
        if count:
            assert self._x is not None
            ctypes.memmove(self._group.inline.memory.address + at, self._x.data_ptr() + start, count)


def _copying(group: SharedMemoryGroup, target: Tensor, received: list[int]) -> Receive:
    """Put what came from each rank behind what came from the one before."""
    source = group.inline.memory.address

    def receive(offsets: Sequence[int], sizes: Sequence[int], done: int) -> None:
        to = target.data_ptr() + done
        for at, size, whole in zip(offsets, sizes, received, strict=True):
            if size:
                ctypes.memmove(to, source + at, size)
            to += whole

    return receive


def _summing(group: SharedMemoryGroup, target: Tensor) -> Receive:
    """Add what came from the ranks, element by element: ((r0 + r1) + r2) + ..."""
    total_N = target.view(-1)
    itemsize = target.element_size()

    def receive(offsets: Sequence[int], sizes: Sequence[int], done: int) -> None:
        count, stride = sizes[0] // itemsize, (offsets[-1] - offsets[0]) // max(1, len(offsets) - 1) // itemsize
        rows = group.view(target.dtype).as_strided((len(offsets), count), (stride, 1), offsets[0] // itemsize).unbind(0)
        piece_N = total_N if count == total_N.numel() else total_N.narrow(0, done // itemsize, count)
        if len(rows) == 1:
            piece_N.copy_(rows[0])
            return
        torch.add(rows[0], rows[1], out=piece_N)
        for row_N in rows[2:]:
            piece_N.add_(row_N)

    return receive


def _host_target(output: Tensor) -> Tensor:
    """Where a collective writes: the output itself, unless that is on a device or has gaps."""
    if output.device.type == "cpu" and output.is_contiguous():
        return output
    return torch.empty(output.shape, dtype=output.dtype)


def _bytes_of_row(x: Tensor) -> int:
    return x.nbytes // x.shape[0] if x.shape[0] else 0


def _evenly(x: Tensor, size: int) -> list[int]:
    return [x.nbytes // size] * size
