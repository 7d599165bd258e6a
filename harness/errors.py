"""Every error that a user can cause, and their common format.

BitproofError
├── UsageError        the call is wrong: an unknown case, an empty selection      (exit status 2)
│   └── CaseError     a case contradicts itself or does not fit the machine       (exit status 2)
├── ChunkError        a module or a graph cannot be split in two as asked         (verdict ERROR)
├── TraceError        the training step cannot be traced                          (verdict ERROR)
├── PlacementError    no placement keeps the case's bound                         (verdict ERROR)
├── PassError         a graph pass met a graph it must not rewrite                (verdict ERROR)
├── RankError         a rank died, raised or hung                                 (verdict ERROR)
├── ArtifactError     a precompiled step is missing, damaged, or not this run's   (verdict ERROR)
├── MachineError      this machine lacks hardware or software the case needs      (verdict UNVERIFIED)
└── RecordingError    a recording or a report is missing, damaged or hostile      (verdict UNVERIFIED)

`assert` marks a condition that only our own bug could break.
"""

from __future__ import annotations

MAX_FACT = 16_384
MAX_TRACEBACK = 65_536
"""Most characters of a traceback, and (MAX_FACT) of any other part of an error.

Other libraries' errors can be long, for example if they contain a printed tensor.
"""


def bounded(text: str, limit: int, source: str | None = None) -> str:
    """Shorten a text that is longer than `limit` to its start and its end; return a shorter text unchanged.

    The gap states the number of omitted characters, and `source`, a hint where to find the whole text.
    """
    if len(text) <= limit:
        return text
    # The end is kept longer: a traceback ends with its message.
    head, tail = limit // 4, limit - limit // 4
    message = f"{len(text) - limit} characters left out" + (f"; {source}" if source else "")
    return f"{text[:head]}\n... {message} ...\n{text[-tail:]}"


def cut(text: str, limit: int) -> str:
    """Return the first `limit` characters of a longer text, followed by "..."; a shorter text unchanged."""
    return text if len(text) <= limit else f"{text[:limit]}..."


class BitproofError(Exception):
    """An error that states what is wrong, where, what was expected, how to fix it, and how to repeat it.

    `what` is a sentence. All other parts are optional, and are left out of the text if they are None. Each part is
    shortened to `longest` characters, since errors are sent between processes and written into reports.
    """

    longest = MAX_FACT

    finds_nothing = False
    """Whether a graph pass raised the error because it found nothing to do.

    Such an error is ignored if the pass finds something to do in another stage of the pipeline.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        where: str | None = None,
        fix: str | None = None,
        replay: str | None = None,
    ) -> None:
        self.what = bounded(what, self.longest)
        self.expected, self.found, self.where, self.fix, self.replay = (
            fact if fact is None else bounded(fact, self.longest) for fact in (expected, found, where, fix, replay)
        )
        super().__init__(str(self))

    def __str__(self) -> str:
        facts = (
            ("expected", self.expected),
            ("found", self.found),
            ("came from", self.where),
            ("fix", self.fix),
            ("replay", self.replay),
        )
        lines = [f"{type(self).__name__}: {self.what}"]
        lines += [f"  {label}: {text}" for label, text in facts if text is not None]
        return "\n".join(lines)


class UsageError(BitproofError):
    """The user's call is wrong, and nothing was run.

    Each part is shortened to 4,000 characters, because arguments of a call can be long.
    """

    longest = 4_000


class CaseError(UsageError):
    """A case contradicts itself, or does not fit this machine.

    Each part is shortened to 1,000 characters, because values in a case's file can be long.
    """

    longest = 1_000


class ChunkError(BitproofError):
    """A module, an activation or a graph region cannot be split in two as the case asks."""


class TraceError(BitproofError):
    """The training step cannot be traced into one joint graph."""


class PlacementError(BitproofError):
    """Every placement of a case's tensors exceeds the memory per rank that the case allows."""


class PassError(BitproofError):
    """A pass met a graph that it must refuse, or its result failed verification."""


class RankError(BitproofError):
    """A rank died, raised an exception, or hung. `rank` is None if no single rank is known to be the cause."""

    def __init__(self, what: str, *, rank: int | None = None, traceback: str | None = None, **facts: str | None):
        self.rank = rank
        self.traceback = traceback if traceback is None else bounded(traceback, MAX_TRACEBACK)
        super().__init__(what, **facts)


class ArtifactError(BitproofError):
    """A precompiled step cannot be made for all ranks, or its file is missing, damaged, or made for another run."""


class MachineError(BitproofError):
    """This machine or its software lacks something that the case needs; another machine may be able to run the case."""


class RecordingError(BitproofError):
    """A recording or a report is missing, incomplete, damaged, or unsafe to read."""
