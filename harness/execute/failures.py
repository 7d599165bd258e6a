"""Describe how ranks fail, and find the rank to blame. Imports no torch.

If a rank fails, its connections close, so other ranks fail as well. The rank to blame is the first that failed for
another reason. For example, rank 1 raises, then ranks 0, 2 and 3 report closed connections: rank 1 is blamed.
"""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from bitproof.harness import errors
from bitproof.harness.errors import MAX_FACT, MAX_TRACEBACK, BitproofError, CaseError, RankError, bounded

# Messages of gloo, NCCL, torch's stores and `harness.shared_memory` after a peer went away.
_LOST_PEER = re.compile(
    r"gloo/transport|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|Socket [Cc]losed|Connection aborted"
    r"|remote process exited|ncclRemoteError|ncclSystemError|store.*(timed out|wait timeout)|Timed out waiting \d+ms"
    r"|has ended while others waited for it"
)

MAX_FOUND = 500
"""The most characters of an exception's text, so that a report that shortens an error still shows the traceback."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a rank.

    - `time`: when it failed, as a reading of `time.monotonic()`.
    - `what`: the end of a sentence about the rank, such as "was killed by signal 9 (SIGKILL)".
    - `secondary`: whether the rank failed only because it lost its connection to another rank.
    """

    rank: int
    time: float
    what: str
    found: str | None = None
    details: str | None = None
    secondary: bool = False


def failure_of_exception(rank: int, error: BaseException, around: Sequence[FrameSummary] = ()) -> Failure:
    """Return the failure of a rank whose code raised `error`. `around` has the stack frames that are still active,
    outermost first.

    The failure's `details` are the traceback, or only the error's text if the traceback adds nothing.
    """
    # torch raises RuntimeError for many reasons, so only the text shows whether a peer closed the connection.
    name, text = type(error).__name__, _message_of(error)
    is_ours = isinstance(error, BitproofError)  # our own errors are complete in the traceback, one fact per line
    found = bounded(text.partition("\n")[0] if is_ours else text.strip(), MAX_FOUND)
    return Failure(
        rank=rank,
        time=time.monotonic(),
        what="raised",
        found=found if found.startswith(name) else f"{name}: {found}",
        details=str(error) if _needs_no_traceback(error, around) else traceback_of(error, around),
        secondary=isinstance(error, (RuntimeError, OSError)) and bool(_LOST_PEER.search(text)),
    )


_STANDARD_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")
_LIBRARY_FOLDERS = tuple(
    os.path.join(folder, "")
    for folder in (
        str(Path(errors.__file__).parents[1]),
        *(os.path.join(sysconfig.get_paths()[library], "torch") for library in ("purelib", "platlib")),
    )
)


def _needs_no_traceback(error: BaseException, around: Sequence[FrameSummary]) -> bool:
    # A CaseError is about the case, not about code. Errors of other libraries always need their traceback.
    if isinstance(error, CaseError) or not isinstance(error, BitproofError):
        return isinstance(error, CaseError)
    frames = (*around, *traceback.extract_tb(error.__traceback__))
    return error.__cause__ is None and error.__context__ is None and not any(_is_user_file(x.filename) for x in frames)


def _is_user_file(path: str) -> bool:
    is_pythons = path.startswith(_STANDARD_LIBRARY) and "-packages" not in path
    return not is_pythons and not path.startswith((*_LIBRARY_FOLDERS, "<frozen"))


def traceback_of(error: BaseException, around: Sequence[FrameSummary] = ()) -> str:
    """Return the text of an exception's traceback, with at most `MAX_TRACEBACK` characters.

    `around` has frames that are still active, outermost first. The text begins with these frames.
    """
    summary = traceback.TracebackException.from_exception(error)
    summary.stack = traceback.StackSummary.from_list([*around, *summary.stack])
    # Each part is shortened first: a message of megabytes must not displace the frames.
    parts = summary.format()
    return bounded("".join(bounded(part, MAX_FACT) for part in parts).rstrip(), MAX_TRACEBACK)


def _message_of(error: BaseException) -> str:
    try:
        return bounded(str(error), MAX_FACT)
    except Exception as problem:  # a `__str__` of another library
        return f"its text cannot be made: {type(problem).__name__}"


def signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        # Most real-time signals have no name.
        return f"signal {number}"


def failure_of_exit(rank: int, status: int, log: Path) -> Failure:
    """Return the failure of a rank whose process ended without a report.

    `status`: the exit status, or the negative number of the signal that killed the process.
    """
    return Failure(rank=rank, time=time.monotonic(), what=describe_exit(status), details=ends(log))


def failure_of_unknown_message(rank: int, error: ValueError) -> Failure:
    # User code may write into any descriptor.
    return Failure(rank=rank, time=time.monotonic(), what="wrote into bitproof's own pipe", found=str(error))


def describe_exit(status: int) -> str:
    """Describe the end of a process that sent no report, as in "exited with status 3 before it finished".

    `status`: the exit status, or the negative number of the signal that killed the process.
    """
    return f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status} before it finished"


def blame(failures: Iterable[Failure]) -> Failure:
    """Return the earliest failure that is not `secondary`. A secondary failure is only due to a lost connection to
    another rank.

    If all failures are secondary, return the earliest.
    """
    # False sorts before True, so failures with a reason of their own come first.
    return min(failures, key=lambda failure: (failure.secondary, failure.time))


def error_of_failure(failure: Failure, system: str, at: str, log: str) -> RankError:
    """Return the error that names the rank to blame. `at` says how far the rank was, as in "at step 3". `log` is the
    path of the rank's log.
    """
    return RankError(
        f"rank {failure.rank} of {system} {failure.what} {at}",
        rank=failure.rank,
        traceback=failure.details,
        found=failure.found,
        where=log,
    )


def error_of_hang(system: str, timeout: float, places: dict[int, str], stacks: str) -> RankError:
    """Return the error for ranks that did not finish in time.

    `places` maps ranks to how far they were, as in {0: "at step 3"}. The error groups them: "ranks 0, 2 at step 3; rank
    1 at step 2".
    """
    at: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        at.setdefault(place, []).append(rank)
    found = "; ".join(f"{_describe_ranks(ranks)} {place}" for place, ranks in at.items())
    return RankError(
        f"{system} did not finish: the case ran longer than {timeout:g} s",
        rank=next(iter(places)) if len(places) == 1 else None,
        traceback=stacks or None,
        expected="every rank to finish",
        found=f"{found}, unfinished",
        fix="see below where the ranks were; if they were only slow, give a longer --timeout",
    )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An error as one process sends it to another: the name of the error's class, and the error's fields by name."""

    error_class: str
    facts: dict[str, Any]

    @staticmethod
    def of(error: BaseException, what: str) -> Problem:
        """Convert an error into a Problem. An error that bitproof does not define becomes a RankError with a traceback.

        The RankError's text begins with `what`: "precompiling moe_tiny failed before its ranks started".
        """
        if not isinstance(error, BitproofError):
            error = RankError(
                f"{what} failed before its ranks started",
                found=f"{type(error).__name__}: {error}",
                where=", ".join(note.strip() for note in getattr(error, "__notes__", ())) or None,
                traceback=traceback_of(error),
            )
        facts = {name: getattr(error, name) for name in ("what", "expected", "found", "where", "fix", "replay")}
        if isinstance(error, RankError):
            facts |= {"rank": error.rank, "traceback": error.traceback}
        return Problem(error_class=type(error).__name__, facts=facts)

    def error(self) -> BitproofError:
        """Convert the Problem back into an error. An unknown class becomes a RankError."""
        # The name comes from another process, so it may be anything: only an error class of this project is used.
        kind = getattr(errors, self.error_class, None)
        if not (isinstance(kind, type) and issubclass(kind, BitproofError)):
            kind = RankError
        error: BitproofError = kind(**self.facts)
        return error


def tail(log: Path, lines: int = 20, limit: int = 16_384) -> str:
    """Return the last `lines` lines of a log, or fewer if they take more than `limit` bytes."""
    try:
        with log.open("rb") as file:
            # A log may have gigabytes, so only its end is read.
            file.seek(max(0, log.stat().st_size - limit))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def ends(log: Path, lines: int = 10, limit: int = 8_192) -> str:
    """Return the first and the last `lines` lines of a log, with "..." between them. Each of the two parts has at most
    `limit` bytes.

    Returns a short log whole, and "" for an unreadable log.
    """
    # A library that aborts the process prints the reason first, such as gloo's message about mismatched collectives,
    # and then a long stack. Other failures print their reason last.
    try:
        with log.open("rb") as file:
            head = file.read(limit).decode(errors="replace").splitlines()[:lines]
            size = log.stat().st_size
    except OSError:
        return ""
    # A log without a middle to leave out is shown whole.
    if size <= limit and len(log.read_text(errors="replace").splitlines()) <= 2 * lines:
        return tail(log, 2 * lines)
    return "\n".join([*head, "...", tail(log, lines, limit)])


def stack_of(log: Path, entry: str) -> str:
    """Return the newest stack dump in the log of a forked process, innermost call first. If the log has no dump, return
    its last lines.

    `entry` is the name of the function in which the process began. The frames outside that function are left out.
    """
    # `faulthandler` writes a dump after each such line. Frames after the entry's are those of this project's fork.
    text = tail(log, lines=200)
    _, found, dump = text.rpartition("most recent call first")
    frames = dump.splitlines()[1:] if found else []
    outer = [index for index, frame in enumerate(frames) if frame.endswith(f"in {entry}")]
    return "\n".join(frames[: outer[0]] if outer else frames[:20]) or tail(log, lines=15)


def log_name(log: Path) -> str:
    """Return a log's path relative to the run folder, such as `logs/moe_tiny/graph/rank1.log`."""
    # The last four parts are `logs`, the case, the system and the file.
    return str(Path(*log.parts[-4:])) if "logs" in log.parts[-4:-3] else str(log)


def _describe_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
