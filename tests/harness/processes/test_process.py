"""What needs a second process, an end with its parent and a log of its own, is in `test_launch.py`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bitproof.harness.processes import process


def test_private_descriptors_are_closed_once_and_others_stay_open(tmp_path) -> None:
    kept, other = (os.open(tmp_path / name, os.O_CREAT) for name in ("kept", "other"))
    process.keep_private(kept)
    process.close_kept(other)
    os.fstat(other)
    process.close_kept(kept)
    with pytest.raises(OSError):
        os.fstat(kept)
    process.close_kept(kept)  # its number may be another's by now
    os.close(other)


@pytest.mark.ranks
def test_what_children_used_is_counted_and_what_they_waited_for_too() -> None:
    before = process.cpu_of_descendants()
    busy = "import time; end = time.process_time() + 0.1\nwhile time.process_time() < end: pass"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()
        assert process.cpu_of_descendants() - before >= 0.1
        child.communicate(b"\n")
    assert process.cpu_of_descendants() <= before, "what ended and was waited for is this process's own"


def test_of_a_log_that_grows_too_long_its_beginning_and_end_stay_and_its_writer_goes_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(process, "MAX_LOG_BYTES", 40)
    monkeypatch.setattr(process, "KEPT_LOG_BYTES", 5)
    log = tmp_path / "rank0.log"
    process.keep_short(log)  # is not there yet
    process._point(fd := os.open(os.devnull, os.O_WRONLY), log, adds=False)
    os.write(fd, b"first" + b"x" * 30 + b"right")
    process.keep_short(log)
    assert log.stat().st_size == 40
    os.write(fd, b"more")
    process.keep_short(log)
    os.write(fd, b" and more")
    os.close(fd)
    assert log.read_bytes() == (
        b"first\n... the middle of this log is left out: it had grown too long ...\ntmore and more"
    )


def test_a_rank_keeps_to_one_core_only_where_ranks_outnumber_cores(monkeypatch) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr(process.sys, "platform", "linux")
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda pid: {4, 6}, raising=False)
    monkeypatch.setattr(process.os, "sched_setaffinity", lambda pid, cores: asked.append(cores), raising=False)
    process.keep_to_one_core(1, 2)
    assert asked == []
    for rank in range(3):
        process.keep_to_one_core(rank, 3)
    assert asked == [{4}, {6}, {4}]
