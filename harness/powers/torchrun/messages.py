"""Messages between torchrun's ranks, and the files that are attached to messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitproof.harness.errors import RankError
from bitproof.harness.execute.failures import Problem
from bitproof.harness.execute.requests import ARCHIVE, VALUES, RunRequest
from bitproof.harness.execute.status_messages import End
from bitproof.harness.powers.torchrun.seats import Seat
from bitproof.harness.processes import framing
from bitproof.harness.records import CaseResult

# A rank's files: its part of a recording, or of a replay, and optional files beside it.
FILES = ("", VALUES, ARCHIVE)


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A rank's first message to rank 0: its number, its machine, and its run folder.

    - `node`: the machine, and torchrun's agent on it.
    - `machine`: a name that differs between machines, even if their host names are equal.
    - `local_rank`: LOCAL_RANK, or None.
    """

    token: str
    rank: int
    world_size: int
    node: str
    machine: str = ""
    local_rank: int | None = None
    run_dir: str


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Rank 0's answer to another rank, once all ranks have connected.

    - `run_dir`: rank 0's run folder.
    - `own_dir`: the other rank's run folder.
    - `seat`: the other rank's number on its machine, and its GPU.
    """

    run_dir: Path
    own_dir: Path
    seat: Seat


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Reports that run number `run` has failed on a rank. The other ranks must stop, since they might wait forever."""

    run: int


@dataclass(frozen=True, kw_only=True)
class Farewell:
    """A rank's last message. `problem` is the reason why the rank leaves; None if it has finished."""

    problem: Problem | None = None


Message = RunRequest | CaseResult | Failed | Farewell


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A rank's report of how its part of a run ended.

    - `run`: number of the run, from 1.
    - `end`: how the part ended; None if an error, `problem`, prevented this.
    - `clock`: time of day minus monotonic clock on the rank's machine. It converts times between machines.
    - `num_bytes`: sizes of the attached files, in the order of `FILES`; 0 for a missing file.
    """

    run: int
    clock: float
    end: End | None = None
    problem: Problem | None = None
    num_bytes: tuple[int, ...] = ()

    @property
    def failed_by_itself(self) -> bool:
        """Whether the rank failed for a reason other than the failure of another rank."""
        failure = self.end.failure if self.end else None
        return self.problem is not None or (failure is not None and not failure.secondary)


def read_message(text: bytes, *kinds: type) -> Any:
    """Parse a message of one of the classes `kinds` from a known rank, and return it. Raises RankError if it is
    invalid.
    """
    try:
        return framing.read(text, *kinds)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RankError(
            "a rank said what no rank says", found=str(error), fix="bring all machines to one commit"
        ) from error


def unpack(account: RunReport, content: Path | None, part: Path) -> None:
    """Split `content`, the bytes that came with a rank's message, into files: `part` with each suffix in `FILES`.

    - `account`: the rank's report, with the size of each file in the same order. A file of size 0 is not written.
    - `content`: a file with the bytes, which is deleted afterwards; None if no bytes came.

    Raises RankError if the size of `content` differs from the sum of the sizes in `account`.
    """
    for suffix in FILES:
        part.with_suffix(suffix).unlink(missing_ok=True)  # an earlier run's
    if content is None:
        return
    if sum(account.num_bytes) != content.stat().st_size or len(account.num_bytes) != len(FILES):
        raise RankError(
            "a rank's files did not arrive whole",
            expected=f"{sum(account.num_bytes)} bytes",
            found=f"{content.stat().st_size} bytes",
        )
    # The files follow each other in one stream, in the order of FILES.
    with content.open("rb") as source:
        for suffix, size in zip(FILES, account.num_bytes, strict=True):
            if not size:
                continue  # the rank has no such file
            with part.with_suffix(suffix).open("wb") as file:
                while size > 0 and (chunk := source.read(min(size, 1 << 20))):
                    size -= file.write(chunk)
    content.unlink()
