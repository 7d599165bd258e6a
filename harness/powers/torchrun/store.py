"""torchrun as its ranks see it: the process that started them, and the store through which they find rank 0."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

from bitproof.harness.capture.rank_fingerprint import describe_ranks
from bitproof.harness.errors import RankError

# Time for a call into torch's store, which handles no signal; and for a call that only reads a value.
_STORE_SECONDS = 5.0
_LOOK_SECONDS = 1.0

A = TypeVar("A")


class Launcher:
    """The torchrun process that started this rank, and its store. If that process dies, its ranks run on until bitproof
    ends them.
    """

    def __init__(self) -> None:
        # The parent is torchrun's agent only if torchrun started this process.
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._store: socket.socket | None = None

    def watch_store(self, address: str, port: int) -> None:
        """Keep an idle connection to the store open, so that `ended` notices the end of the store."""
        if self._store is None:
            with suppress(OSError):
                self._store = socket.create_connection((address, port), timeout=_STORE_SECONDS)
                self._store.setblocking(False)

    def is_orphan(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

    def ended(self) -> RankError | None:
        """Return the error to raise if torchrun's process or the store is gone; None while both exist."""
        if self.is_orphan():
            return RankError(
                f"torchrun has ended on {socket.gethostname()}, whose rank {os.environ['RANK']} it had started",
                expected="torchrun's agents to live until their ranks have ended",
                fix="see what ended it on that machine: the kernel's log, or a scheduler's",
            )
        if self._store is not None and _is_closed(self._store):
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return RankError(
                f"the store at which ranks meet has ended, at {where}",
                expected="torchrun's agent on that machine to live until all ranks have ended",
                fix="see what ended it there",
            )
        return None

    def error_of_dead_siblings(self) -> RankError | None:
        """Return an error that names those ranks of this torchrun process that have ended; None if all live.

        Always None except on Linux, which lists the children of a process.
        """
        # torchrun ends all ranks of its machine if one dies, but does not report which.
        lines = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        if self._parent is None or not all(map(str.isdecimal, lines)):
            return None
        if not (processes := children_environments(self._parent)):
            return None
        rank, local_rank, count = map(int, lines)
        living = {int(value) for each in processes for name, value in each if name == "RANK"}
        # torchrun numbers the ranks of an agent consecutively.
        first = rank - local_rank
        dead = [each for each in range(first, first + count) if each not in living]
        if not dead:
            return None
        return RankError(
            f"{describe_ranks(dead)} ended on {socket.gethostname()} before all ranks had come",
            rank=dead[0],
            expected=f"torchrun's {describe_ranks(range(first, first + count))} there to live",
            found=f"{describe_ranks(sorted(living))} alone",
            fix="see what ended it on that machine: what it printed last, torchrun's own lines, the kernel's log",
        )

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class Store:
    """torch's key-value store, in which rank 0 publishes its address. torchrun or rank 0 serves it.

    `where` describes why the last call failed, or is "". Each call has a time limit.
    """

    def __init__(self, is_rank_0: bool, deadline: float, launcher: Launcher) -> None:
        self._deadline = deadline
        self._launcher = launcher
        self._address, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._is_server = is_rank_0 and not self._is_torchruns
        self._store: Any = None
        self.where = ""

    def put(self, word: str, instead_of: str | None = None) -> str | None:
        """Store `word` as rank 0's message if the stored message is `instead_of` (None: no message is stored yet).

        Returns the message that is then stored; None if the store cannot be reached.
        """
        found = self._use(lambda store: store.compare_set(_key(), instead_of or "", word))
        return cast(bytes, found).decode() if found is not None else None

    def get(self) -> str | None:
        """Return rank 0's message; None if there is none yet, or the store cannot be reached."""

        def look(store: Any) -> str | None:
            try:
                store.wait([_key()], timedelta(seconds=_LOOK_SECONDS))
            except RuntimeError:  # the store raises a subclass on a timeout, and this class when its server ends
                return None
            return cast(bytes, store.get(_key())).decode()

        found = self._use(look)
        if found is None and not self.where:
            self.where = "rank 0 has not reached the store"
        return cast("str | None", found)

    def _use(self, act: Callable[[Any], object]) -> object:
        self.where = ""
        at = f"{self._address}:{self._port}"
        if not self._is_server:
            try:
                # torch's own client would wait for a server, so look first whether anything listens.
                socket.create_connection((self._address, self._port), timeout=_LOOK_SECONDS).close()
            except OSError as error:
                self._store, self.where = None, f"nothing listens at {at}: {error.strerror or error}"
                return None
            if self._is_torchruns:
                self._launcher.watch_store(self._address, self._port)
        try:
            if self._store is None:
                self._store = _in_thread(self._open, self._deadline)
            return _in_thread(lambda: act(self._store), self._deadline)
        except TimeoutError:
            what = (
                "its own store is not open yet" if self._is_server else "what listens there does not answer as a store"
            )
            # The client is dropped: its thread may still be within a call.
            self._store, self.where = None, f"at {at} {what}"
        except Exception as error:
            self._store, self.where = None, f"the store at {at}: {type(error).__name__}: {error}"
        return None

    def _open(self) -> Any:
        from torch.distributed import TCPStore

        return TCPStore(
            self._address,
            self._port,
            world_size=None,
            is_master=self._is_server,
            timeout=timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )


def _in_thread(act: Callable[[], A], deadline: float) -> A:
    """Run `act` in a thread and return its result. Meanwhile, the calling thread handles signals.

    Raises TimeoutError if `act` has not ended by `deadline`.
    """
    found: list[A] = []
    problems: list[BaseException] = []

    def work() -> None:
        try:
            found.append(act())
        except BaseException as error:
            problems.append(error)

    # In a thread: the store's C++ code handles no signals and may wait for long.
    thread = threading.Thread(target=work, name="bitproof-store", daemon=True)
    thread.start()
    limit = min(deadline, time.monotonic() + 4 * _STORE_SECONDS)
    try:
        while thread.is_alive() and time.monotonic() < limit:
            thread.join(0.05)
    finally:
        if thread.is_alive():
            # After an interrupt, too: Python does not exit cleanly while a thread runs C++ code.
            thread.join(2 * _LOOK_SECONDS)
    if problems:
        raise problems[0]
    if not found:
        raise TimeoutError
    return found[0]


def _key() -> str:
    # torchrun may restart all ranks with the same store: each attempt has a key of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"bitproof/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}/rank0"


def children_environments(parent: int) -> list[list[tuple[str, str]]]:
    found = []
    try:
        for task in Path(f"/proc/{parent}/task").iterdir():
            for child in (task / "children").read_text().split():
                # A child may end between the two reads.
                with suppress(FileNotFoundError, ProcessLookupError):
                    content = Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace")
                    pairs = (line.partition("=") for line in content.split("\0"))
                    found.append([(name, value) for name, _, value in pairs if name])
    except OSError:
        return []
    return found


def _is_closed(watched: socket.socket) -> bool:
    try:
        # Nothing is sent on this connection, so the only thing that can be read is its end.
        return watched.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
