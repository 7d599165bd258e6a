"""What a check is, and what it gets to judge by. Imports no torch: checks run in the command's process."""

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
    """One case after its verdict, as a check sees it.

    `result` has the verdict, the numbers of compared records, times, memory and throughput, and the findings of the
    checks before this one. `path(role)` is the folder of a side's recording and `recording(role)` reads it: a digest
    for each (step, kind, name, rank). `run(role)` runs a side once more, within the time limit of a case, and returns
    that run's recording. `log` is a file for what the check wants to keep. `packing` names the graph's nodes that only
    pack right values, if every call was compared.
    """

    result: CaseResult
    options: RunOptions
    log: Path
    path: Callable[[Role], Path]
    recording: Callable[[Role], Recording]
    run: Callable[[Role], Recording]
    packing: tuple[str, ...] | None = None

    @property
    def case(self) -> Case:
        """The case, with everything that can change a bit."""
        return self.result.case


class Check:
    """One check. A subclass has a name, a dataclass of options and `judge`.

    `Options` is a frozen dataclass whose fields are settings (`bitproof.setting`): from them come the options of the
    command line, the keywords of `bitproof.run` and the replay line. The class's docstring begins with a sentence that
    says what the check finds out.
    """

    name: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, options: Any) -> None:
        """`options` is an `Options`."""
        self.options = options

    @classmethod
    def of(cls, options: Any) -> Self | None:
        """The check that these options ask for; None if they switch it off. By default it is on."""
        return cls(options)

    def refuse(self, options: RunOptions) -> None:
        """Raise UsageError, before anything runs, for a run that this check cannot be part of."""

    def prepare(self, cases: Sequence[Case], options: RunOptions, folder: Path) -> Iterator[str]:
        """Work before any case runs, once for all of them; yields lines to print. `folder` is the run folder."""
        return iter(())

    def judges(self, verdict: Verdict) -> bool:
        """Whether this check judges a case with that verdict. By default an ERROR leaves nothing to judge."""
        return verdict != Verdict.ERROR

    def judge(self, evidence: Evidence) -> Finding | None:
        """What this check finds of a case; None if it has nothing to say. Runs once a case, after the verdict."""
        raise NotImplementedError(f"check {self.name} does not define judge")

    @staticmethod
    def finding(data: dict[str, Any]) -> Finding:
        """The finding that these data were part of, for checks whose data older reports have elsewhere."""
        return Finding(data=data)

    @staticmethod
    def contradiction(data: dict[str, Any]) -> tuple[str, str, str] | None:
        """A field of a finding's data, read from a file, that cannot be: its path, what is expected, what is found."""
        return None
