"""Shared memory through which the ranks of a machine exchange data. Does not import torch.

- `SharedMemory`: a mapping made before ranks are forked. It has no name, so it vanishes with its last process.
- `Ring`: a ring buffer for the ranks of a group. In each exchange, every rank writes its part of a slot, waits until
  all have written, reads the other parts, and reports that it has read them. Then the slot is free again.
- `Board`: a line of text from each rank, which the creator can read at any time.

Ranks are synchronized by counters, which the system call FUTEX_WAKE_OP increments atomically, since Python has no
atomic operations. The last rank wakes all others. Counters are never reset: they count up to the number of ranks in
even rounds, and down to zero in odd rounds.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import select
import sys
import time
from collections.abc import Sequence

INLINE_SLOTS, INLINE_BYTES = 8, 256 << 10
"""How many messages of a group may be unread, and the bytes of a rank's space for each."""
BULK_SLOTS, BULK_BYTES = 4, 512 << 10
"""Larger messages go through these, in pieces."""

# Numbers of the system call `futex` by architecture, and of its operations, as the kernel defines them.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE_OP = 0, 5
_NORESERVE = 0x4000  # Linux's MAP_NORESERVE: pages that are never written take no memory
_LINE = 64
_LINE_BYTES = 256
_MAX_RANKS = 2047  # FUTEX_WAKE_OP compares with a number of 12 bits
_ALL = 2**31 - 1
# The longest sleep before a rank checks whether the others are alive, and the looks at a counter before it sleeps.
_SLICE_NS = 20_000_000
_SPINS = 300


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def is_supported() -> bool:
    """Return whether this machine's ranks can communicate through shared memory: this needs Linux and FUTEX_WAKE_OP."""
    if sys.platform != "linux" or platform.machine() not in _SYS_FUTEX:
        return False
    try:
        memory = SharedMemory(1, num_areas=1)
        memory.arrive(0, True, 1)
    except OSError:
        return False
    return memory.words[0] == 1


class SharedMemory:
    """A memory mapping through which all groups of a run exchange data.

    Create it before forking. Each rank must call `join`, and then `next_area` for its groups in the same order.
    """

    def __init__(self, world_size: int, num_areas: int = 16) -> None:
        assert 0 < world_size <= _MAX_RANKS, "a counter holds that many"
        self.world_size = world_size
        self._areas_left = list(range(num_areas))
        self._ring_words = 2 * (INLINE_SLOTS + BULK_SLOTS) * _LINE
        self._area_bytes = world_size * (INLINE_SLOTS * INLINE_BYTES + BULK_SLOTS * BULK_BYTES)
        # A line for each rank's process id, then the counters of each area; the larger of both sizes bounds every part.
        head = world_size * (1 + num_areas) * max(_LINE, self._ring_words)
        self._areas_at = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._areas_at + num_areas * self._area_bytes
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
        self.words = memoryview(self.map).cast("I")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._futex = ctypes.CDLL(None, use_errno=True).syscall
        pointer = ctypes.c_void_p
        self._futex.argtypes = [ctypes.c_long, pointer, ctypes.c_int, ctypes.c_uint, pointer, pointer, ctypes.c_uint]
        self._number = _SYS_FUTEX[platform.machine()]
        self._slice = ctypes.addressof(_SLICE)
        self._is_ordered = platform.machine() == "x86_64"
        # On a machine with fewer cores than ranks, spinning would keep the last rank from running.
        self._spins = _SPINS if world_size <= len(os.sched_getaffinity(0)) else 0
        self._pidfds: dict[int, int] = {}

    def close(self) -> None:
        """Free the mapping in this process. No other object may refer to the mapping any more."""
        self.words.release()
        self.map.close()

    def join(self, rank: int) -> None:
        """Register this process as rank `rank`, so that other ranks notice when it ends."""
        self.words[rank * _LINE // 4] = os.getpid()

    def next_area(self, partition: Sequence[Sequence[int]], rank: int, timeout: float) -> tuple[Ring, Ring] | None:
        """Return two rings for this rank's group: one for small messages, one for large. None if no memory is left.

        `partition` has the list of ranks of each group. `timeout` is the longest wait in seconds.
        """
        if not self._areas_left:
            return None
        area = self._areas_left.pop(0)
        first = 0
        for ranks in partition:
            if rank in ranks:
                break
            # `first` is the number of ranks in the groups before: each group has its own part of the area.
            first += len(ranks)
        words_at = self.world_size * _LINE + (area * self.world_size + first) * self._ring_words
        data_at = self._areas_at + area * self._area_bytes
        bulk_words_at = words_at + 2 * INLINE_SLOTS * _LINE
        bulk_at = data_at + self.world_size * INLINE_SLOTS * INLINE_BYTES
        return (
            Ring(self, ranks, rank, first, words_at, data_at, INLINE_SLOTS, INLINE_BYTES, timeout),
            Ring(self, ranks, rank, first, bulk_words_at, bulk_at, BULK_SLOTS, BULK_BYTES, timeout),
        )

    def arrive(self, at: int, is_up: bool, size: int) -> None:
        """Count this rank's arrival; the last of `size` ranks wakes the others.

        `at` is the counter's offset in bytes. The counter counts up to `size` if `is_up`, otherwise down to 0.
        """
        # Operation ADD, comparison EQUAL: `1 << 28 | 0 << 24 | addend << 12 | the counter before the last arrival`.
        operation = 1 << 28 | (1 << 12 | (size - 1) if is_up else 0xFFF << 12 | 1)
        # The addition comes after the rank's earlier writes: on x86 it is a locked instruction, on ARM a release and a
        # barrier.
        word = self.address + at
        nobody_waits_here = word + 4  # the call also wakes a waiter at its first address, whatever the counter is
        if self._futex(self._number, nobody_waits_here, _FUTEX_WAKE_OP, 1, _ALL, word, operation) < 0:
            raise OSError(ctypes.get_errno(), "futex cannot count an arrival")

    def wait(self, at: int, target: int, ranks: Sequence[int], timeout: float) -> None:
        """Wait until the counter at byte offset `at` has the value `target`, which means that all `ranks` have arrived.

        Raises RuntimeError if one of the ranks has ended, and TimeoutError after `timeout` seconds.
        """
        words, index = self.words, at // 4
        # Spinning is cheaper than a sleep if the last rank is about to arrive.
        for _ in range(self._spins):
            if words[index] == target:
                break
        limit = None
        while (value := words[index]) != target:
            # The kernel sleeps only if the counter still is `value`: an arrival in between is never missed.
            if self._futex(self._number, self.address + at, _FUTEX_WAIT, value, self._slice, None, 0) == 0:
                continue
            number = ctypes.get_errno()
            if number == errno.ETIMEDOUT:
                limit = limit or time.monotonic() + timeout
                # A rank may arrive and then end: only if the counter is still wrong after this look was the rank
                # missing.
                ended = self._ended(ranks)
                if words[index] == target:
                    break
                if ended is not None:
                    raise RuntimeError(f"rank {ended} has ended while others waited for it")
                if time.monotonic() >= limit:
                    raise TimeoutError(f"Timed out waiting {timeout * 1000:.0f}ms for ranks {list(ranks)}")
            elif number not in (errno.EAGAIN, errno.EINTR):
                raise OSError(number, "futex cannot wait")
        if not self._is_ordered:
            self._fence()

    def _fence(self) -> None:
        # An x86 CPU keeps loads in order. On other machines this system call, which adds 0 to a word, acts as a
        # barrier: the loads of the data come after the load that shows the last arrival.
        word = self.address + _LINE // 2
        self._futex(self._number, word + 4, _FUTEX_WAKE_OP, 1, 0, word, 1 << 28)

    def _ended(self, ranks: Sequence[int]) -> int | None:
        poll = select.poll()
        rank_of = {}
        for rank in ranks:
            pid = self.words[rank * _LINE // 4]
            # A rank that has not joined yet has the process id 0.
            if pid and rank not in self._pidfds:
                try:
                    self._pidfds[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    return rank
                except OSError:  # a kernel without pidfds: the ranks' parent watches them
                    return None
            if rank in self._pidfds:
                rank_of[self._pidfds[rank]] = rank
                poll.register(self._pidfds[rank], select.POLLIN)
        return min((rank_of[fd] for fd, _ in poll.poll(0)), default=None)


class Board:
    """A line of text for each rank. The rank writes it, and the process that made the board reads it.

    A line that is read during a write may be partly old and partly new.
    """

    def __init__(self, world_size: int) -> None:
        self._map = mmap.mmap(-1, world_size * _LINE_BYTES)

    def write(self, rank: int, line: str) -> None:
        # A zero byte ends the text: the rest of an older, longer line may follow it.
        content = line.encode()[: _LINE_BYTES - 1]
        at = rank * _LINE_BYTES
        self._map[at : at + len(content) + 1] = content + b"\0"

    def read(self, rank: int) -> str:
        """Return a rank's line; "" if the rank has not written a line."""
        at = rank * _LINE_BYTES
        return self._map[at : at + _LINE_BYTES].partition(b"\0")[0].decode(errors="replace")

    def close(self) -> None:
        self._map.close()


class Ring:
    """Ring buffer in shared memory for the ranks of a group. All ranks must make the same calls.

    For each exchange, call `begin_post`, write, call `end_post` and `begin_read`, read all ranks' pieces, call
    `end_read`. The pieces of consecutive ranks are `stride` bytes apart.
    """

    def __init__(
        self,
        memory: SharedMemory,
        ranks: Sequence[int],
        rank: int,
        first: int,
        words_at: int,
        data_at: int,
        num_slots: int,
        stride: int,
        timeout: float,
    ) -> None:
        self.memory = memory
        self.num_slots = num_slots
        self.stride = stride
        self.posted = 0
        self.read = 0
        self.ranks = list(ranks)
        self._size = len(self.ranks)
        self._mine = self.ranks.index(rank) * stride
        self._timeout = timeout
        # Two counters per slot, a cache line apart: for pieces that are written, and for pieces that are read.
        self._words = [words_at + 2 * slot * _LINE for slot in range(num_slots)]
        self._slots = [data_at + (slot * memory.world_size + first) * stride for slot in range(num_slots)]

    @property
    def is_full(self) -> bool:
        return self.posted - self.read == self.num_slots

    def begin_post(self) -> int:
        """Wait until all ranks have read the next slot, and return the offset in bytes for this rank's piece."""
        assert not self.is_full
        round_, slot = divmod(self.posted, self.num_slots)
        if round_:
            # The slot is free when all ranks have read the piece of the round before.
            self._wait(self._words[slot] + _LINE, round_ - 1)
        return self._slots[slot] + self._mine

    def end_post(self) -> None:
        round_, slot = divmod(self.posted, self.num_slots)
        self.posted += 1
        self.memory.arrive(self._words[slot], round_ % 2 == 0, self._size)

    def begin_read(self) -> int:
        """Wait until all ranks have posted their pieces, and return the offset in bytes of the first rank's piece."""
        round_, slot = divmod(self.read, self.num_slots)
        self._wait(self._words[slot], round_)
        return self._slots[slot]

    def end_read(self) -> None:
        round_, slot = divmod(self.read, self.num_slots)
        self.read += 1
        self.memory.arrive(self._words[slot] + _LINE, round_ % 2 == 0, self._size)

    def _wait(self, at: int, round_: int) -> None:
        self.memory.wait(at, self._size if round_ % 2 == 0 else 0, self.ranks, self._timeout)


_SLICE = _Timespec(0, _SLICE_NS)
