"""The interface of a check, and the evidence that it gets. Imports no torch: checks run in the command's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bitproof.harness.records import Finding, Role, Verdict

if TYPE_CHECKING:
    from bitproof.harness.case import Case
    from bitproof.harness.options import RunOptions
    from bitproof.harness.records import CaseResult, Recording


@dataclass(frozen=True)
class NoOptions:
    """The options of a check that has none."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A case with its verdict, as a check gets it.

    `result` has the verdict, the numbers of compared records, times, memory and throughput, and the findings of earlier
    checks. A role is "reference" or "candidate": `path(role)` is the folder of its recording and `recording(role)`
    reads it: a digest for each (step, kind, name, rank). `run(role)` runs its system again, within the case's time
    limit, and returns the new recording. `log_calls(role, step)` replays it and returns an archive of the step's calls
    per rank. `call("MODULE:FUNCTION", **values)` calls a function with the case in a process that has torch. `log` is a
    file for the check's own output. `packing` has the graph nodes that only pack correct values, if every call was
    compared.
    """

    result: CaseResult
    options: RunOptions
    log: Path
    path: Callable[[Role], Path]
    recording: Callable[[Role], Recording]
    run: Callable[[Role], Recording]
    log_calls: Callable[[Role, int], list[Path]]
    call: Callable[..., dict[str, Any]]
    packing: tuple[str, ...] | None = None

    @property
    def case(self) -> Case:
        """The case, with everything that can change a bit."""
        return self.result.case


class Check:
    """A check. A subclass has a name, a dataclass of options and `judge`.

    `Options` is a frozen dataclass whose fields are settings (`bitproof.setting`). They define the options of the
    command line, the keywords of `bitproof.run` and the replay command. The class's docstring starts with a sentence
    about the check's question.
    """

    name: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, options: Any) -> None:
        """`options` is an `Options`."""
        self.options = options

    @classmethod
    def of(cls, options: Any) -> Self | None:
        """The check with these options; None if they switch it off. By default it is on."""
        return cls(options)

    def refuse(self, options: RunOptions) -> None:
        """Raise UsageError, before anything runs, if the check does not support this run."""

    def prepare(self, cases: Sequence[Case], options: RunOptions, folder: Path) -> Iterator[str]:
        """Prepare before any case runs, once for all of them; yields lines to print. `folder` is the run folder."""
        return iter(())

    def values(self, case: Case, system: str) -> tuple[str, ...]:
        """The patterns of `--values` for the tensors whose values a system's recording must keep, beyond the user's."""
        return ()

    def judges(self, verdict: Verdict) -> bool:
        """Whether this check judges a case with that verdict. By default an ERROR leaves nothing to judge."""
        return verdict != Verdict.ERROR

    def judge(self, evidence: Evidence) -> Finding | None:
        """Judge a case, once, after its verdict. Returns None if there is nothing to report."""
        raise NotImplementedError(f"check {self.name} does not define judge")

    @staticmethod
    def finding(data: dict[str, Any]) -> Finding:
        """Rebuild a finding from its data, for a check whose data older reports have in another place."""
        return Finding(data=data)

    @staticmethod
    def contradiction(data: dict[str, Any]) -> tuple[str, str, str] | None:
        """An impossible value in a finding's data from a file, as path, expected and found; None if there is none."""
        return None
