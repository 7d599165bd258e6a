"""Connections between ranks: messages of any size, strangers, peers that vanish or only stop for a while."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bitproof.harness.powers.torchrun import connections
from bitproof.harness.powers.torchrun.connections import Connection, Connections
from bitproof.harness.processes import framing

LOOPBACK = "127.0.0.1"
HEADER = struct.Struct(">8sQQ")


@dataclass(frozen=True, kw_only=True)
class Word:
    token: str
    text: str = ""


@dataclass
class Pair:
    """Rank 0's end and another's, with the line between them as each has it."""

    leader: Connections
    other: Connections
    here: Connection
    there: Connection


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Connections]:
    (tmp_path / "leader").mkdir()
    made = Connections(tmp_path / "leader")
    yield made
    made.close()


@pytest.fixture
def pair(leader: Connections, tmp_path: Path) -> Iterator[Pair]:
    (tmp_path / "other").mkdir()
    other = Connections(tmp_path / "other")
    there = other.connect(LOOPBACK, leader.listen(LOOPBACK), "rank 0")
    other.send(there, Word(token="t"))
    [(here, said)] = soon(leader.newcomers)
    assert said["token"] == "t"
    leader.welcome(here, "rank 1")
    yield Pair(leader, other, here, there)
    other.close()


def soon(look: Callable[[], Any], seconds: float = 15.0) -> Any:
    limit = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.01)
    return found


def test_messages_come_in_order_and_as_they_were(pair: Pair) -> None:
    for number in range(50):
        pair.leader.send(pair.here, Word(token=str(number), text="x" * (number * 1000)))
    for number in range(50):
        text, files = soon(lambda: pair.other.take(pair.there))
        assert framing.read(text, Word) == Word(token=str(number), text="x" * (number * 1000))
        assert files is None


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 0, 3), (40 << 20, 5, 1 << 20)])
def test_files_of_any_size_come_whole(sizes: tuple[int, ...], pair: Pair, tmp_path: Path) -> None:
    """torch's store ends the connection of who sends more than 8 MiB."""
    generator, files = random.Random(0), []
    for number, size in enumerate(sizes):
        files.append(tmp_path / f"file{number}")
        files[-1].write_bytes(generator.randbytes(size))
    pair.other.send(pair.there, Word(token="a"), files)
    pair.other.send(pair.there, Word(token="b"))
    text, content = soon(lambda: pair.leader.take(pair.here), 60)
    assert framing.read(text, Word).token == "a"
    expected = b"".join(file.read_bytes() for file in files)
    assert (content.read_bytes() if content else b"") == expected
    text, content = soon(lambda: pair.leader.take(pair.here))
    assert (framing.read(text, Word).token, content) == ("b", None)


def test_a_peer_whose_process_ends_is_gone_at_once(pair: Pair) -> None:
    began = time.monotonic()
    pair.there.socket.shutdown(socket.SHUT_RDWR)
    assert soon(lambda: pair.here.gone)
    assert time.monotonic() - began < 2


def test_a_peer_that_falls_silent_is_gone_after_a_while_and_not_before(
    leader: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its machine loses its power: nobody closes the connection."""
    monkeypatch.setattr(connections, "SILENCE", 2.0)
    peer = socket.create_connection((LOOPBACK, leader.listen(LOOPBACK)))
    text = framing.write(Word(token="t"))
    peer.sendall(HEADER.pack(connections.MAGIC_WORD, len(text), 0) + text)
    [(line, _)] = soon(leader.newcomers)
    leader.welcome(line, "rank 1")
    time.sleep(1.0)
    assert line.gone is None
    assert soon(lambda: line.gone, 5) == "nothing came from it for 2 s"
    peer.close()


def test_a_peer_that_says_nothing_for_long_but_lives_is_not_gone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENCE", 2.0)
    time.sleep(3)
    assert pair.here.gone is pair.there.gone is None


def test_a_process_that_was_stopped_itself_does_not_hold_others_for_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop that sleeps, a debugger. What came meanwhile is read first."""
    monkeypatch.setattr(connections, "SILENCE", 2.0)
    monkeypatch.setattr(connections, "PAUSE_SECONDS", 0.5)
    with pair.leader._changed, pair.other._changed:  # nothing is served meanwhile, as when processes are stopped
        time.sleep(2.5)
    time.sleep(0.8)
    assert pair.here.gone is pair.there.gone is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n", "another language"),
        (HEADER.pack(b"bitprf\x00\x02", 2, 0) + b"{}", "another version of ours"),
        (HEADER.pack(connections.MAGIC_WORD, 1 << 40, 0), "before anybody knew it"),
        (HEADER.pack(connections.MAGIC_WORD, 2, 1 << 40) + b"{}", "before anybody knew it"),
        (HEADER.pack(connections.MAGIC_WORD, 4, 0) + b"[[[[", "nothing of ours"),
        (HEADER.pack(connections.MAGIC_WORD, 1 << 19, 0) + b"[" * (1 << 19), "nothing of ours"),
        (HEADER.pack(connections.MAGIC_WORD, 3, 0) + b"123", "nothing of ours"),
    ],
)
def test_strangers_are_sent_away_and_nothing_of_theirs_is_kept(content: bytes, why: str, leader: Connections) -> None:
    gone: list[str] = []
    drop = leader._drop
    leader._drop = lambda line, reported: (gone.append(reported), drop(line, reported))[1]  # type: ignore[method-assign]
    with socket.create_connection((LOOPBACK, leader.listen(LOOPBACK))) as peer:
        peer.sendall(content)
        soon(lambda: leader.newcomers() or gone)
        assert why in gone[0]
        peer.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while peer.recv(1 << 16):
                pass
    assert not list(leader._spool.iterdir())


@pytest.mark.parametrize(
    ("limits", "number", "now"),
    [((1024, 4096), 900, None), ((1024, 4096), 2000, 2000), ((1024, 4096), 9000, 4096), ((-1, -1), 9000, None)],
)
def test_a_process_may_have_as_many_connections_as_there_are_ranks(limits, number, now, monkeypatch) -> None:
    done: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda *given: done.append(given))
    connections.allow_open_files(number)
    assert done == ([] if now is None else [(resource.RLIMIT_NOFILE, (now, limits[1]))])


def test_damaged_messages_of_a_known_peer_end_its_line_and_nothing_else(pair: Pair) -> None:
    generator = random.Random(1)
    for _ in range(20):
        with contextlib.suppress(OSError):
            pair.there.socket.send(generator.randbytes(200))
        if pair.here.gone:
            break
        time.sleep(0.02)
    assert soon(lambda: pair.here.gone)
    assert pair.leader._thread.is_alive()


def test_many_threads_may_send_at_once(pair: Pair) -> None:
    threads = [
        threading.Thread(target=lambda n=n: [pair.other.send(pair.there, Word(token=str(n))) for _ in range(100)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [framing.read(soon(lambda: pair.leader.take(pair.here))[0], Word).token for _ in range(400)]
    assert sorted(found) == sorted(str(n) for n in range(4) for _ in range(100))


def test_what_waits_is_sent_before_a_process_leaves(pair: Pair) -> None:
    pair.other.send(pair.there, Word(token="t", text=os.urandom(4_000_000).hex()))
    pair.other.close(10.0)
    text, _ = soon(lambda: pair.leader.take(pair.here))
    assert len(framing.read(text, Word).text) == 8_000_000
