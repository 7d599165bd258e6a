"""How ranks fail, and which one is to blame. Loads no torch.

One rank's failure makes others fail: their peers' connections close. The blame goes to the first
rank that failed by itself; a rank that only lost its peers is blamed when there is nobody else.
"""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import RankError

# What gloo, NCCL and torch's stores say when a peer went away.
_LOST_PEER = re.compile(
    r"gloo/transport|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|Socket [Cc]losed|Connection aborted"
    r"|remote process exited|ncclRemoteError|ncclSystemError|store.*(timed out|wait timeout)|Timed out waiting \d+ms"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's end. `time` is the machine's monotonic clock; `secondary` marks one that only lost its peers."""

    rank: int
    time: float
    what: str
    found: str | None = None
    details: str | None = None
    secondary: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The failure as plain JSON values."""
        return asdict(self)


def failure_of_exception(rank: int, error: BaseException) -> Failure:
    """A rank that raised, seen from inside it."""
    found = str(error) if "\n" not in str(error) else str(error).splitlines()[0]
    name = type(error).__name__
    return Failure(
        rank=rank,
        time=time.monotonic(),
        what="raised",
        found=found if found.startswith(name) else f"{name}: {found}",
        details="".join(traceback.format_exception(error)).rstrip(),
        secondary=isinstance(error, (RuntimeError, OSError)) and bool(_LOST_PEER.search(str(error))),
    )


def failure_of_exit(rank: int, status: int, log: Path) -> Failure:
    """A rank that ended without saying why, seen from outside. `status` is as `os.waitstatus_to_exitcode` gives it."""
    if status < 0:
        what = f"was killed by signal {-status} ({signal.Signals(-status).name})"
    else:
        what = f"exited with status {status} before it finished"
    return Failure(rank=rank, time=time.monotonic(), what=what, details=tail(log))


def blame(failures: Iterable[Failure]) -> Failure:
    """The first failure that was nobody else's doing; else the first of all."""
    return min(failures, key=lambda failure: (failure.secondary, failure.time))


def error_of_failure(failure: Failure, system: str, at: str, log: str) -> RankError:
    """The error that names the rank to blame."""
    return RankError(
        f"rank {failure.rank} of {system} {failure.what} {at}",
        rank=failure.rank,
        traceback=failure.details,
        found=failure.found,
        where=log,
    )


def error_of_hang(system: str, timeout: float, places: dict[int, str], stacks: str) -> RankError:
    """The error for ranks that did not finish in time. `places` says where each unfinished rank was."""
    at: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        at.setdefault(place, []).append(rank)
    found = "; ".join(f"{_tell_ranks(ranks)} {place}" for place, ranks in at.items())
    return RankError(
        f"{system} did not finish: the case ran longer than {timeout:g} s",
        rank=next(iter(places)) if len(places) == 1 else None,
        traceback=stacks or None,
        expected="every rank to finish",
        found=f"{found}, unfinished",
        fix="see below where the ranks were; if they were only slow, give a longer --timeout",
    )


def tail(log: Path, lines: int = 20, limit: int = 16_384) -> str:
    """The end of a log, at most `lines` lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - limit))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _tell_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
