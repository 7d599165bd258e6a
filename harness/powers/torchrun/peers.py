"""The other ranks, as a rank of torchrun sees them: connections, messages, and which ranks are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bitproof.harness.capture.rank_fingerprint import describe_ranks
from bitproof.harness.errors import BitproofError, RankError
from bitproof.harness.execute.failures import Problem
from bitproof.harness.execute.requests import RankFingerprint, RunRequest
from bitproof.harness.powers.torchrun.connections import Connection, Connections, allow_open_files
from bitproof.harness.powers.torchrun.messages import Failed, Farewell, Message, RunReport, read_message
from bitproof.harness.powers.torchrun.store import Launcher
from bitproof.harness.records import CaseResult
from bitproof.harness.runtime import interrupts

# Time for a rank to notice that another failed. On NCCL it may never notice: its host waits for the device.
_PEER_SECONDS = 5.0
# Connections between two processes: to rank 0, and over gloo in every process group.
_FILES_A_RANK = 16


class Peers:
    """All ranks other than this one.

    `connections` has the connections by rank: on rank 0 to every other rank, on other ranks only to rank 0. Received
    files are stored in the folder `spool`.
    """

    def __init__(self, rank: int, world_size: int, spool: Path) -> None:
        self.rank = rank
        self.world_size = world_size
        allow_open_files(1024 + _FILES_A_RANK * world_size)
        self.has_outcome = False
        """Whether rank 0 has sent the final result or error, which rank 0 also shows to the user."""
        self.token = ""
        """The secret that a rank's first message must contain."""
        self.run_number = 0
        self.lost: BitproofError | None = None
        """Why no further run can succeed."""
        self.connections: dict[int, Connection] = {}
        self.fingerprint: dict[int, RankFingerprint] = {}
        self.accounts: dict[int, tuple[RunReport, Path | None]] = {}
        self.left: dict[int, Problem] = {}
        self.heard: list[Message] = []
        self.failed_at = float("inf")
        self.meet_latecomer: Callable[[Connection, dict[str, Any]], None] | None = None
        """On rank 0, once all ranks have connected: handles a process that connects after that."""
        self.links = Connections(spool)
        self.launcher = Launcher()

    def begin_run(self) -> int:
        self.run_number += 1
        self.failed_at = float("inf")
        return self.run_number

    def send_to_all(self, message: Message) -> None:
        for connection in self.connections.values():
            self.links.send(connection, message)

    def listen(self) -> None:
        if self.meet_latecomer is not None:
            for newcomer, said in self.links.newcomers():
                self.meet_latecomer(newcomer, said)
        for rank, connection in self.connections.items():
            # Messages of a rank that is gone since are still handled: they may hold its reason.
            while (message := self.links.take(connection)) is not None:
                self.take(rank, *message)

    def take(self, rank: int, text: bytes, files: Path | None) -> None:
        # Rank 0 sends runs and results; the other ranks send versions and accounts. Any other message is damaged.
        if self.rank:
            message = read_message(text, RunRequest, CaseResult, Failed, Farewell)
        else:
            message = read_message(text, RankFingerprint, RunReport, Failed, Farewell)
        match message:
            case RunReport():
                if message.run == self.run_number:  # a late message is about a run that has ended
                    self.accounts[rank] = message, files
            case RankFingerprint():
                self.fingerprint[rank] = message
            case Failed():
                if message.run == self.run_number:
                    self.note_failed()
            case Farewell(problem=problem) if self.rank == 0:
                self.left[rank] = problem or Problem.of(RuntimeError("it ended"), f"rank {rank}")
            case _:
                self.heard.append(message)

    def gone(self) -> dict[int, str]:
        found = {
            rank: f"{connection.gone}" for rank, connection in self.connections.items() if connection.gone is not None
        }
        for rank, problem in self.left.items():
            found[rank] = f"it left: {problem.error().what}"
        return found

    def refuse_lost(self, when: str = "before all was done") -> None:
        """Raise RankError if any rank, or this rank's torchrun, is gone. `when` says in the error at what stage of the
        run this is.
        """
        error: BitproofError | None = self.launcher.ended()
        # If this rank's own torchrun has ended, lost connections are a consequence, and not the cause.
        if (gone := self.gone()) and not self.launcher.is_orphan():
            ranks = sorted(gone)
            found = [f"{describe_ranks([rank])}: {why}" for rank, why in sorted(gone.items())]
            error = self._error_of_another_rank(gone) or RankError(
                f"{describe_ranks(ranks)} vanished {when}",
                rank=ranks[0] if len(ranks) == 1 else None,
                expected=f"{self.world_size} ranks until the end",
                # If rank 0 died, its torchrun agent ends moments later, and with it torchrun's store: the error names
                # both.
                found="; ".join(found + ([error.what] if error is not None else [])),
                fix="see what ended it on its machine: its log there, the kernel's, torchrun's own",
            )
        if error is not None:
            self.lost = self.lost or error
            raise error

    def explained(self, caught: BaseException) -> BaseException:
        """Return the error that explains why this rank ends.

        If torchrun ends this rank by a signal because other ranks are gone, returns the error about those ranks;
        otherwise returns `caught`.
        """
        if self.rank and isinstance(caught, interrupts.STOPS):
            try:
                with interrupts.held():
                    self.refuse_lost()
            except BitproofError as lost:
                return lost
        return caught

    def _error_of_another_rank(self, gone: Collection[int]) -> BitproofError | None:
        # Such an error names a rank that is still connected, which explains why others left.
        errors = (problem.error() for problem in self.left.values())
        return next((each for each in errors if getattr(each, "rank", None) not in (None, *gone)), None)

    def report_failure(self) -> None:
        """Report to the connected ranks that this rank's run has failed, since they may wait for this rank forever."""
        self.send_to_all(Failed(run=self.run_number))

    def note_failed(self) -> None:
        """Note that the run has failed on a rank. On rank 0, also report it to all other ranks."""
        if self.failed_at == float("inf"):
            # Only the first failure counts: the time that others have left runs from it.
            self.failed_at = time.monotonic()
            if self.rank == 0:
                self.report_failure()

    def has_lost(self) -> bool:
        self.listen()
        return bool(self.gone()) or self.launcher.ended() is not None

    def is_abandoned(self) -> bool:
        """Whether this rank's processes must be killed, because its part of a run cannot end by itself.

        True if a rank is gone, or if another rank failed more than 5 s ago.
        """
        if self.has_lost():
            self.note_failed()
            return True
        return time.monotonic() - self.failed_at > _PEER_SECONDS

    def launcher_must_live(self) -> None:
        if (ended := self.launcher.ended()) is not None:
            self.lost = ended
            raise ended

    def close(self, seconds: float) -> None:
        self.links.close(seconds)
        self.launcher.close()
