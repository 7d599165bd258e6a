"""What runs may take at once, from what a machine says of its cores and its memory."""

import os

import pytest

from bitproof.harness.machine import capacity
from bitproof.harness.machine.capacity import free_memory
from bitproof.harness.powers.side_by_side import concurrency
from bitproof.harness.powers.side_by_side.concurrency import (
    HOST_BYTES,
    RANK_BYTES,
    cores_for_runs,
    num_at_once,
    num_in_memory,
)

GIB = 1 << 30


@pytest.fixture
def container(tmp_path, monkeypatch):
    """The folder of a container's limits, empty at first; the machine itself has 8 cores."""
    for module in (capacity, concurrency):
        monkeypatch.setattr(module, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    return tmp_path


def test_cores_are_those_that_this_process_may_run_on_and_no_more_than_its_container_is_given(container):
    assert cores_for_runs() == 8
    (container / "cpu.max").write_text("max 100000\n")
    assert cores_for_runs() == 8
    (container / "cpu.max").write_text("350000 100000\n")
    assert cores_for_runs() == 3
    (container / "cpu.max").write_text("50000 100000\n")
    assert cores_for_runs() == 1, "less than one is one, which takes longer"


def test_workers_of_pytest_share_the_cores(container, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    assert cores_for_runs() == 2
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "none")
    assert cores_for_runs() == 8


def test_memory_is_what_is_available_and_no_more_than_the_container_has_left(container):
    machine = free_memory()
    assert machine is not None and machine > 0
    for name, text in (("max", "1000000"), ("current", "700000"), ("stat", "anon 500000\nfile 200000\n")):
        (container / f"memory.{name}").write_text(text)
    assert free_memory() == 500_000, "what files take is given back"
    (container / "memory.max").write_text("max\n")
    assert free_memory() > 500_000


@pytest.mark.parametrize(
    ("ranks", "cores", "memory", "expected"),
    [
        (1, 2, None, 2),
        (2, 2, None, 1),
        (8, 2, None, 1),
        (8, 32, 64 * GIB, 4),
        (8, 32, 2 * (HOST_BYTES + 8 * RANK_BYTES), 2),
        (8, 32, 1, 1),
    ],
)
def test_runs_go_at_once_where_each_rank_has_a_core_and_memory(ranks, cores, memory, expected):
    assert num_at_once(ranks, cores, memory) == expected


def test_who_asks_for_more_than_there_are_cores_gets_what_memory_allows():
    assert num_in_memory(8, None, most=4) == 4
    assert num_in_memory(8, 3 * (HOST_BYTES + 8 * RANK_BYTES), most=4) == 3
