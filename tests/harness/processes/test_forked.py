"""What a forked process says, how it ends, and what it leaves to its parent."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from bitproof.harness.processes import framing
from bitproof.harness.processes.forked import Child, ask_for_stacks, fork, fork_asked
from bitproof.harness.processes.process import close_kept, keep_private
from bitproof.harness.processes.watching import Watch

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Said:
    """A message."""

    text: str


def ended(child: Child) -> int | None:
    child.wait(20)
    status = child.status
    child.kill()
    return status


def test_a_body_says_things_and_its_status_is_what_it_returns(tmp_path):
    log = tmp_path / "logs" / "child.log"

    def body(send):
        send(Said("hello"))
        os.write(1, b"printed\n")
        return 7

    child = fork(body, log=log)
    line = child.inlet.wait(20)
    assert line is not None
    assert framing.read(line, Said) == Said("hello")
    assert ended(child) == 7
    assert log.read_text() == "printed\n"
    assert fork_and_end(lambda send: None) == 0


def fork_and_end(body) -> int | None:
    return ended(fork(body))


def test_one_that_raises_shows_where_and_fails_and_never_returns_into_its_parents_frames(tmp_path):
    log, before = tmp_path / "child.log", os.getpid()

    def body(send):
        raise SystemExit("enough")

    try:
        child = fork(body, log=log)
    finally:
        assert os.getpid() == before
    assert ended(child) == 1
    assert 'raise SystemExit("enough")' in log.read_text()


def test_a_signal_is_a_negative_status_and_killing_twice_does_no_harm():
    child = fork(lambda send: time.sleep(60))
    assert not child.has_ended()
    child.kill_without_waiting()
    child.kill()
    child.kill()
    assert child.status == -signal.SIGKILL
    assert not psutil.pid_exists(child.pid)


def test_one_that_is_asked_hears_requests_until_its_parent_hangs_up():
    def body(send, requests):
        with open(requests, "rb") as lines:
            for line in lines:
                send(Said(framing.read(line, Said).text.upper()))

    child = fork_asked(body)
    for word in ("one", "two"):
        child.send(Said(word))
        line = child.inlet.wait(20)
        assert line is not None
        assert framing.read(line, Said) == Said(word.upper())
    child.close_requests()
    assert ended(child) == 0


def test_a_process_has_none_of_the_pipes_of_those_forked_before():
    def body(send):
        mine = Path("/proc/self/fd")
        send(Said(" ".join(str(fd.readlink()) for fd in mine.iterdir() if fd.exists() or fd.is_symlink())))

    first = fork(lambda send: time.sleep(60))
    pipe = os.readlink(f"/proc/self/fd/{first.inlet.fd}")
    second = fork(body)
    line = second.inlet.wait(20)
    assert line is not None
    assert pipe not in framing.read(line, Said).text.split()
    first.kill()
    assert ended(second) == 0


def test_a_stack_is_shown_in_the_log_and_the_process_goes_on(tmp_path):
    log = tmp_path / "child.log"

    def in_a_loop(send):
        send(Said("here"))
        time.sleep(60)

    child = fork(in_a_loop, log=log)
    child.inlet.wait(20)
    ask_for_stacks([child.pid])
    assert "in in_a_loop" in log.read_text()
    assert not child.has_ended()
    child.kill()


def test_it_ends_with_its_parent():
    def middle(send):
        inner = fork(lambda send: time.sleep(60))
        send(Said(str(inner.pid)))
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(middle)
    line = child.inlet.wait(20)
    assert line is not None
    inner = int(framing.read(line, Said).text)
    assert ended(child) == -signal.SIGKILL
    limit = time.monotonic() + 10
    while psutil.pid_exists(inner) and psutil.Process(inner).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_watch_hears_all_of_several_and_what_one_said_last_before_it_died():
    def body(number):
        def live(send):
            for count in range(100):
                send(Said(f"{number} {count}"))
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return number

        return live

    children = [fork(body(number)) for number in range(3)]
    heard = {child: [] for child in children}
    with Watch(children) as watch:
        while not watch.is_over:
            for child, line in watch.look(5):
                heard[child].append(framing.read(line, Said).text)
    assert [heard[child] for child in children] == [[f"{n} {count}" for count in range(100)] for n in range(3)]
    assert [child.status for child in children] == [0, 1, -signal.SIGKILL]
    for child in children:
        child.kill()


def test_a_watch_ends_when_nobody_waits_any_more():
    reader, writer = os.pipe()
    keep_private(writer)  # else the child has it too
    child = fork(lambda send: time.sleep(60))
    with Watch([child], reader) as watch:
        assert list(watch.look(0.1)) == []
        close_kept(writer)
        with pytest.raises(SystemExit, match="nothing waits"):
            list(watch.look(20))
    os.close(reader)
    child.kill()


def test_output_of_the_parent_is_not_printed_twice(capfd):
    print("before", end="")
    assert fork_and_end(lambda send: None) == 0
    sys.stdout.flush()
    assert capfd.readouterr().out == "before"
