"""Connections between torchrun's ranks: each rank is connected to rank 0, and a thread serves the connections.

- A message is a line of JSON (`framing.py`), which may be followed by files.
- Each end of a connection sends an empty message (a heartbeat) every second, so a peer that vanishes is noticed within
  SILENCE seconds.
- A peer is trusted only if its first message contains the run's token.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from bitproof.harness.processes import framing

SILENCE = 7.0
"""Seconds without a message after which a peer counts as gone."""
_PULSE_SECONDS = 1.0
PAUSE_SECONDS = 3.0
"""If an iteration of the serving thread takes so many seconds more than its timeout, this process was suspended.

Then the silence of peers does not count.
"""
_HEADER = struct.Struct(">8sQQ")  # MAGIC, and the sizes in bytes of the JSON and of the files
MAGIC_WORD = b"bitprf\x00\x01"
# A stranger can connect too, so its first message must be short.
_MAX_FIRST, _MAX_TEXT = 1 << 20, 1 << 30
"""Most bytes of JSON in a peer's first message, and in each later message."""
_PART = 1 << 20
_MAX_WAITING = 1024  # peers that connect at the same moment
_CONNECT_SECONDS = 5.0


def allow_open_files(number: int) -> None:
    """Allow this process and its descendants `number` open files, or as many as the system permits.

    A shell's limit is often 1,024, and each connection is an open file.
    """
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if least != resource.RLIM_INFINITY and least < number:
        wanted = number if most == resource.RLIM_INFINITY else min(number, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class Connection:
    """A connection to a peer, which is another rank's process.

    - `name`: name of the peer in errors.
    - `is_known`: whether the peer's first message was accepted.
    - `gone`: why the connection ended, or None.
    - `inbox`: received messages, each paired with a file or None.
    """

    def __init__(self, peer: socket.socket, name: str, spool: Path) -> None:
        peer.setblocking(False)
        # Small messages must not wait for later ones.
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = peer
        self.name = name
        self.is_known = False
        self.gone: str | None = None
        self.heard_at = self.sent_at = time.monotonic()
        self.inbox: deque[tuple[bytes, Path | None]] = deque()
        self._spool = spool
        self._outbox: deque[memoryview | IO[bytes]] = deque()
        self._received = bytearray()
        self._wanted: tuple[int, int] | None = None
        self._text = b""
        self._file: IO[bytes] | None = None
        self._missing = 0

    @property
    def is_within_message(self) -> bool:
        """Whether a part of the peer's next message has arrived, but not all of it."""
        return self._wanted is not None

    @property
    def has_more(self) -> bool:
        return bool(self._outbox)

    def put(self, text: bytes, files: Sequence[Path] = ()) -> None:
        opened = [file.open("rb") for file in files]
        # Of the open files: the paths may be replaced before all bytes are sent.
        size = sum(os.fstat(file.fileno()).st_size for file in opened)
        self._outbox.append(memoryview(_HEADER.pack(MAGIC_WORD, len(text), size) + text))
        self._outbox.extend(opened)

    def queue_heartbeat(self) -> None:
        # Any message shows that this process lives, so a queued one is enough.
        if not self._outbox:
            self._outbox.append(memoryview(_HEADER.pack(MAGIC_WORD, 0, 0)))

    def send(self) -> None:
        while self._outbox:
            # A file is read in parts, so memory does not grow with its size.
            first = self._outbox[0]
            if not isinstance(first, memoryview):
                part = first.read(_PART)
                if not part:
                    first.close()
                    self._outbox.popleft()
                else:
                    # The next part goes before the file, which is read on when it is sent.
                    self._outbox.appendleft(memoryview(part))
                continue
            try:
                sent = self.socket.send(first)
            except (BlockingIOError, InterruptedError):
                return
            self.sent_at = time.monotonic()
            if sent == len(first):
                self._outbox.popleft()
            else:
                self._outbox[0] = first[sent:]

    def receive(self) -> None:
        """Receive the bytes that have arrived.

        Raises ValueError for an invalid message, and OSError if the peer is gone.
        """
        for _ in range(64):  # a bound, so that other peers are served too
            try:
                content = self.socket.recv(_PART)
            except (BlockingIOError, InterruptedError):
                return
            if not content:
                raise ConnectionError("its connection was closed")
            self.heard_at = time.monotonic()
            self._received += content
            self._read()

    def close(self, why: str) -> None:
        self.gone = self.gone or why
        self.socket.close()
        for item in self._outbox:
            if not isinstance(item, memoryview):
                item.close()
        self._outbox.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> None:
        while True:
            # Messages arrive in any pieces: one read may bring a part of a message, or several messages.
            if self._wanted is None:
                if len(self._received) < _HEADER.size:
                    return
                magic, text, content = _HEADER.unpack_from(self._received)
                if magic != MAGIC_WORD:
                    raise ValueError("it speaks another language, or another version of ours")
                # Before a buffer of that size is filled: a stranger must not exhaust the memory.
                if text > (_MAX_TEXT if self.is_known else _MAX_FIRST) or (content and not self.is_known):
                    raise ValueError(f"it announced {text} and {content} bytes before anybody knew it")
                del self._received[: _HEADER.size]
                # A pulse: an empty message.
                if not text and not content:
                    continue
                self._wanted = text, content
            text, content = self._wanted
            # The JSON comes first and is kept in memory until it is complete; files then go to disk in pieces.
            if self._file is None:
                if len(self._received) < text:
                    return
                self._text = bytes(self._received[:text])
                del self._received[:text]
                if not content:
                    self._finish(None)
                    continue
                self._file, self._missing = self._spool.open("wb"), content
            part = memoryview(self._received)[: self._missing]
            self._file.write(part)
            taken = len(part)
            part.release()
            # A memoryview must be released before its bytearray can shrink.
            del self._received[:taken]
            self._missing -= taken
            if self._missing:
                return
            self._file.close()
            self._file = None
            self._finish(self._spool)

    def _finish(self, files: Path | None) -> None:
        self.inbox.append((self._text, files))
        self._wanted, self._text = None, b""


class Connections:
    """All connections of this process, served by a thread until `close`.

    Received files are stored in the folder `spool`. When a peer sends files again, they replace its earlier files.
    """

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._number = 0
        self._connections: list[Connection] = []
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._changed = threading.Condition()
        # A byte through this pair wakes the serving thread from its select.
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="bitproof-links", daemon=True)
        self._thread.start()

    def listen(self, address: str) -> int:
        """Accept connections of peers from now on, and return the port.

        If `address` is a loopback address, only processes of this machine can connect.
        """
        # Otherwise on all addresses of this machine, since peers may resolve its name to different ones.
        if address == "localhost" or address.startswith("127."):
            listener = socket.create_server((address, 0), backlog=_MAX_WAITING)
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_MAX_WAITING)
        else:
            listener = socket.create_server(("", 0), backlog=_MAX_WAITING)
        # A peer may vanish between select and accept.
        listener.setblocking(False)
        with self._changed:
            self._listener = listener
            self._selector.register(listener, selectors.EVENT_READ)
        self._wake()
        return int(listener.getsockname()[1])

    def connect(self, address: str, port: int, name: str) -> Connection:
        # The address is from torchrun's store, so this peer needs no token to be trusted.
        peer = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        with self._changed:
            connection = self._add(peer, name)
            connection.is_known = True
        self._wake()
        return connection

    def send(self, connection: Connection, message: Any, files: Sequence[Path] = ()) -> None:
        """Queue a message for a peer; does nothing if the peer is gone."""
        text = framing.write(message)
        with self._changed:
            if connection.gone is None:
                connection.put(text, files)
        self._wake()

    def take(self, connection: Connection) -> tuple[bytes, Path | None] | None:
        """Return a peer's next message as a pair: JSON, and the file with attached bytes (None if there are none).

        Return None if no message has arrived.
        """
        with self._changed:
            return connection.inbox.popleft() if connection.inbox else None

    def newcomers(self) -> list[tuple[Connection, dict[str, Any]]]:
        """Return the new connections whose first message has arrived, each paired with that message.

        A peer whose first message is not a JSON object is disconnected.
        """
        found = []
        with self._changed:
            for connection in [
                connection for connection in self._connections if not connection.is_known and connection.inbox
            ]:
                text, _ = connection.inbox.popleft()
                try:
                    said = json.loads(text)
                except (ValueError, RecursionError):
                    said = None
                if isinstance(said, dict):
                    found.append((connection, said))
                else:
                    self._drop(connection, "it says nothing of ours")
        return found

    def welcome(self, connection: Connection, name: str) -> None:
        with self._changed:
            connection.is_known, connection.name = True, name

    def disconnect(self, connection: Connection, why: str) -> None:
        """Close the connection to a peer, after sending queued messages for at most a second. `why` is the reason."""
        self._flush([connection], _PULSE_SECONDS)
        with self._changed:
            self._drop(connection, why)

    def wait(self, seconds: float) -> None:
        """Wait until any connection changes, but at most `seconds`, and at most 0.2 s so that signals are handled."""
        with self._changed:
            self._changed.wait(min(seconds, 0.2))

    def close(self, seconds: float = 0.0) -> None:
        """Close all connections, after sending queued messages for at most `seconds`."""
        # The serving thread must have ended before sockets are closed: it may be within `select` on them.
        self._flush(self._connections, seconds)
        with self._changed:
            self._is_over = True
        self._wake()
        self._thread.join(5.0)
        for connection in self._connections:
            connection.close("this process is done")
        if self._listener is not None:
            self._listener.close()
        self._waker.close()
        self._woken.close()
        self._selector.close()

    def _flush(self, connections: Sequence[Connection], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while (
            any(connection.has_more and connection.gone is None for connection in connections)
            and time.monotonic() < limit
        ):
            self.wait(0.05)

    def _add(self, peer: socket.socket, name: str) -> Connection:
        self._number += 1
        connection = Connection(peer, name, self._spool / f"files{self._number}")
        self._connections.append(connection)
        self._selector.register(peer, selectors.EVENT_READ, connection)
        return connection

    def _drop(self, connection: Connection, why: str) -> None:
        if connection.gone is None:
            with contextlib.suppress(KeyError, ValueError):
                # KeyError if it is not registered any more, ValueError if the socket is closed already.
                self._selector.unregister(connection.socket)
            connection.close(why)
            self._changed.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            # A full buffer is no loss: then the thread has a reason to wake already.
            self._waker.send(b".")

    def _serve(self) -> None:
        turn = time.monotonic()
        while True:
            with self._changed:
                if self._is_over:
                    return
                # A socket can nearly always be written, so ask for that only if data is waiting: otherwise `select`
                # would return at once, again and again.
                for connection in self._connections:
                    if connection.gone is None:
                        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_more else 0)
                        self._selector.modify(connection.socket, events, connection)
            ready = self._selector.select(_PULSE_SECONDS / 2)
            with self._changed:
                if self._is_over:
                    return
                for key, events in ready:
                    self._handle_event(key.fileobj, key.data, events)
                turn = self._check_pulses(turn)

    def _handle_event(self, source: Any, connection: Connection | None, events: int) -> None:
        if source is self._woken:
            with contextlib.suppress(OSError):
                self._woken.recv(4096)
            self._changed.notify_all()
        elif connection is None:
            with contextlib.suppress(OSError):
                # A stranger until its first message has shown the token.
                peer, address = source.accept()
                self._add(peer, f"an unknown process at {address[0]}")
        elif connection.gone is None:
            try:
                if events & selectors.EVENT_WRITE:
                    connection.send()
                if events & selectors.EVENT_READ:
                    connection.receive()
            except ValueError as error:
                self._drop(connection, str(error))
            except OSError as error:
                self._drop(connection, error.strerror or str(error))
            self._changed.notify_all()

    def _check_pulses(self, before: float) -> float:
        """Send heartbeats, and disconnect peers that have sent nothing for SILENCE seconds. Returns the present time.

        `before` is the time of the previous call.
        """
        now = time.monotonic()
        # If this process was suspended (SIGSTOP, a paused machine), silence says nothing about the peers.
        was_stopped = now - before > _PULSE_SECONDS / 2 + PAUSE_SECONDS
        for connection in self._connections:
            if connection.gone is not None:
                continue
            if was_stopped:
                connection.heard_at = now
            if now - connection.sent_at > _PULSE_SECONDS:
                connection.queue_heartbeat()
            if now - connection.heard_at > SILENCE:
                self._drop(connection, f"nothing came from it for {SILENCE:g} s")
        if any(connection.gone is not None for connection in self._connections):
            # A new list, since another thread may iterate over the old one in `_flush`.
            self._connections = [connection for connection in self._connections if connection.gone is None]
        return now
