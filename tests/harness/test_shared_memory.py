"""Forked processes that meet in shared memory: what each reads, what it waits for, and how it learns that one ended."""

import itertools
import json
import os
import platform
import signal
import time
from pathlib import Path

import pytest

from bitproof.harness import shared_memory
from bitproof.harness.shared_memory import BULK_BYTES, INLINE_BYTES, INLINE_SLOTS, Board, SharedMemory, is_supported

pytestmark = pytest.mark.ranks

THREE = [[0, 1, 2]]


def on_ranks(world_size, body, partition=None, timeout=20.0):
    """What `body(rank, inline, bulk)` returns on each rank, or raises: forked processes over one new mapping."""
    memory, children = SharedMemory(world_size, num_areas=1), []
    for rank in range(world_size):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                memory.join(rank)
                rings = memory.next_area(partition or [list(range(world_size))], rank, timeout)
                answer = body(rank, *rings)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        children.append((pid, reader))
    answers = []
    for pid, reader in children:
        with open(reader) as pipe:
            answers.append(pipe.read())
        os.waitpid(pid, 0)
    memory.close()
    return [json.loads(answer) if answer else None for answer in answers]


def post(ring, number):
    at = ring.begin_post()
    ring.memory.map[at : at + 8] = number.to_bytes(8, "little")
    ring.end_post()


def read(ring, size):
    first = ring.begin_read()
    places = range(first, first + size * ring.stride, ring.stride)
    numbers = [int.from_bytes(ring.memory.map[at : at + 8], "little") for at in places]
    ring.end_read()
    return numbers


def test_every_rank_reads_what_all_posted_in_every_round_of_the_slots():
    def body(rank, inline, bulk):
        found = []
        for number in range(3 * INLINE_SLOTS + 1):
            post(inline, 10 * number + rank)
            found.append(read(inline, 3))
        return found

    expected = [[10 * number + rank for rank in range(3)] for number in range(3 * INLINE_SLOTS + 1)]
    assert on_ranks(3, body) == [expected] * 3


def test_posts_run_ahead_of_reads_until_the_ring_is_full():
    def body(rank, inline, bulk):
        for number in range(INLINE_SLOTS):
            assert not inline.is_full
            post(inline, number)
        return [inline.is_full, *[read(inline, 2) for _ in range(INLINE_SLOTS)]]

    assert on_ranks(2, body) == [[True, *[[number] * 2 for number in range(INLINE_SLOTS)]]] * 2


def test_a_slot_is_written_again_only_when_all_have_read_it():
    def body(rank, inline, bulk):
        found = []
        for first in (0, INLINE_SLOTS):
            for number in range(first, first + INLINE_SLOTS):
                post(inline, number)
            if rank == 1:
                time.sleep(0.3)  # by now rank 0 has read everything, and would post into the same slots
            found += [read(inline, 2) for _ in range(INLINE_SLOTS)]
        return found

    assert on_ranks(2, body) == [[[number] * 2 for number in range(2 * INLINE_SLOTS)]] * 2


def test_parts_of_a_partition_meet_by_themselves():
    def body(rank, inline, bulk):
        post(bulk, rank)
        return read(bulk, 2 if rank < 2 else 1)

    assert on_ranks(3, body, [[0, 1], [2]]) == [[0, 1], [0, 1], [2]]


def test_a_rank_that_ends_while_others_wait_is_named_at_once():
    def body(rank, inline, bulk):
        if rank == 1:
            os._exit(0)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"^rank 1 has ended while others waited for it$"):
            post(inline, 0)
            read(inline, 3)
        assert time.monotonic() - began < 5, "the deadline is 20 s away"
        time.sleep(0.2)  # the other one waits for rank 1, not for this one
        return "told"

    assert on_ranks(3, body) == ["told", None, "told"]


def test_a_rank_that_posted_and_ended_is_waited_for_by_nobody():
    def body(rank, inline, bulk):
        post(inline, rank)
        if rank == 1:
            return None
        time.sleep(0.1)
        return read(inline, 2)

    assert on_ranks(2, body) == [[0, 1], None]


def test_a_wait_ends_at_its_deadline():
    def body(rank, inline, bulk):
        if rank == 1:
            time.sleep(0.5)
            return None
        post(inline, rank)
        return read(inline, 2)

    late = "TimeoutError: Timed out waiting 100ms for ranks [0, 1]"
    assert on_ranks(2, body, timeout=0.1) == [late, None]


def test_a_mapping_has_no_name():
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    memory = SharedMemory(2)
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert after - before == set()
    lines = Path("/proc/self/maps").read_text().splitlines()
    [line] = [
        line for line in lines if int(line.split("-")[0], 16) <= memory.address < int(line.split("-")[1].split()[0], 16)
    ]
    assert line.endswith("/dev/zero (deleted)")
    memory.close()


def test_no_two_rings_of_a_mapping_share_a_byte():
    memory = SharedMemory(3, num_areas=2)
    used = [(rank * 64, 64) for rank in range(3)]
    for partition in ([[0, 2], [1]], [[0, 1, 2]]):
        left = list(memory._areas_left)
        for ranks in partition:
            memory._areas_left = list(left)
            rings = memory.next_area(partition, ranks[0], 1.0)
            for ring, size in zip(rings, (INLINE_BYTES, BULK_BYTES), strict=True):
                used += [(at, 128) for at in ring._words]
                used += [(slot + i * size, size) for slot in ring._slots for i in range(len(ranks))]
    used.sort()
    assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(used))
    assert used[-1][0] + used[-1][1] <= len(memory.map)
    assert memory.next_area(THREE, 0, 1.0) is None, "a group too many is told so, and meets elsewhere"
    memory.close()


def test_machines_whose_system_calls_are_not_known_do_not_share(monkeypatch):
    assert is_supported()
    is_supported.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    assert not is_supported()
    monkeypatch.undo()
    is_supported.cache_clear()
    assert is_supported()


def test_where_loads_are_not_in_order_a_barrier_follows_every_wait(monkeypatch):
    memory = SharedMemory(1, num_areas=1)
    fences = []
    monkeypatch.setattr(memory, "_fence", lambda: fences.append(True))
    for memory._is_ordered in (True, False):
        memory.wait(0, 0, [0], 1.0)
    assert fences == [True]
    monkeypatch.undo()
    before = bytes(memory.map[:4096])
    memory._fence()
    assert bytes(memory.map[:4096]) == before, "it adds nothing"
    assert shared_memory.is_supported()


def test_a_board_has_each_ranks_last_line_after_the_rank_was_killed():
    board = Board(3)
    for rank, lines in enumerate((["first", "last"], ["x" * 1000])):
        if (pid := os.fork()) == 0:
            for line in lines:
                board.write(rank, line)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
    assert [board.read(rank) for rank in range(3)] == ["last", "x" * 255, ""]
    board.close()
