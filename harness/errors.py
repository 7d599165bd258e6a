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
"""The most characters of each part of an error: another library's exception may contain a whole printed tensor."""


def bounded(text: str, limit: int, source: str | None = None) -> str:
    """The start and the end of a text that is longer than `limit`; a shorter text unchanged.

    Between them are the number of omitted characters and `source`, which says where these can be found.
    """
    if len(text) <= limit:
        return text
    # The end is kept longer: a traceback ends with its message.
    head, tail = limit // 4, limit - limit // 4
    told = f"{len(text) - limit} characters left out" + (f"; {source}" if source else "")
    return f"{text[:head]}\n... {told} ...\n{text[-tail:]}"


def cut(text: str, limit: int) -> str:
    """The first `limit` characters of a longer text, followed by "..."; a shorter text unchanged."""
    return text if len(text) <= limit else f"{text[:limit]}..."


class BitproofError(Exception):
    """An error that answers five questions: what is wrong, where, what was expected, how to fix it, how to replay it.

    `what` is a sentence; every other part is optional and omitted from the text when absent. Very long parts are
    shortened: errors travel between processes, and end in reports.
    """

    longest = MAX_FACT

    finds_nothing = False
    """Whether a pass raised it because it found nothing to do.

    It is no error if the pass finds something in another stage of the pipeline.
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
    """The call is wrong; nothing was run.

    Parts are shortened to 4,000 characters, as a call may have arguments of any length.
    """

    longest = 4_000


class CaseError(UsageError):
    """A case contradicts itself, or does not fit this machine.

    Parts are shortened to 1,000 characters: a case's file may have values of any length.
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
    """A rank died, raised or hung. `rank` is None if no single rank is to blame."""

    def __init__(self, what: str, *, rank: int | None = None, traceback: str | None = None, **facts: str | None):
        self.rank = rank
        self.traceback = traceback if traceback is None else bounded(traceback, MAX_TRACEBACK)
        super().__init__(what, **facts)


class ArtifactError(BitproofError):
    """A precompiled step cannot be made for all ranks, or its file is missing, damaged, or not made for this run."""


class MachineError(BitproofError):
    """This machine or its software lacks something that the case needs. Another machine can judge the case."""


class RecordingError(BitproofError):
    """A recording or a report is missing, incomplete, damaged or hostile."""
