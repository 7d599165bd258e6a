"""The interface of a check, and the evidence that a check gets about a case.

Imports no torch, since checks run in the process of the command.
"""

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
    """The options of a check that needs no options."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A case with its verdict, and the means to examine it: the argument of a check's `judge`.

    A role is "reference" or "candidate".

    - `result`: the verdict, the numbers of compared records, times, memory, throughput, and findings of earlier checks.
    - `log`: a file for the check's own output.
    - `path(role)`: returns the folder of the recording of the role's system.
    - `recording(role)`: reads this recording, which has a digest for each (step, kind, name, rank).
    - `run(role)`: runs the role's system again, with a new time limit, and returns the new recording.
    - `log_calls(role, step)`: runs the role's system again, and returns for each rank the file with the logged operator
      calls of this step, counted from 0.
    - `calls(role, step)`: the same, but returns for each rank the list of its calls, as `Call` of `localize.logs`.
    - `call("MODULE:FUNCTION", **values)`: calls a function with the case, in a process that has torch.
    - `packing`: graph nodes of the candidate without a counterpart in the reference, which merely concatenate correct
      values, for example by `cat`. None unless every call was compared.
    """

    result: CaseResult
    options: RunOptions
    log: Path
    path: Callable[[Role], Path]
    recording: Callable[[Role], Recording]
    run: Callable[[Role], Recording]
    log_calls: Callable[[Role, int], list[Path]]
    calls: Callable[[Role, int], list[list[Any]]]
    call: Callable[..., dict[str, Any]]
    packing: tuple[str, ...] | None = None

    @property
    def case(self) -> Case:
        """The case, which has every setting that can change a bit of a run."""
        return self.result.case


class Check:
    """Base class of checks. A subclass defines `name`, `Options` and `judge`.

    - `Options`: a frozen dataclass whose fields are settings (`bitproof.setting`): options of the command line and
      keywords of `bitproof.run`.
    - `judge`: answers the check's question about a case.

    The docstring of a subclass begins with a sentence about its question.
    """

    name: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, options: Any) -> None:
        """Create the check. `options` is an instance of the class's `Options`."""
        self.options = options

    @classmethod
    def of(cls, options: Any) -> Self | None:
        """Return the check with these options; None if the options switch it off. By default, no options switch it
        off."""
        return cls(options)

    def refuse(self, options: RunOptions) -> None:
        """Raise UsageError, before any case runs, if the check does not support this run."""

    def prepare(self, cases: Sequence[Case], options: RunOptions, folder: Path) -> Iterator[str]:
        """Prepare the check before any case runs, and yield lines to print. Called once. `folder` is the run folder."""
        # An empty iterator, so that a subclass may override this by a generator.
        return iter(())

    def values(self, case: Case, system: str) -> tuple[str, ...]:
        """Return patterns for the tensors whose values a recording must keep for this check (see `--values`)."""
        return ()

    def judges(self, verdict: Verdict) -> bool:
        """Whether `judge` is called for a case with this verdict. By default it is called for all verdicts but
        ERROR.
        """
        return verdict != Verdict.ERROR

    def judge(self, evidence: Evidence) -> Finding | None:
        """Answer the check's question about a case with a verdict. Returns None if there is nothing to report."""
        raise NotImplementedError(f"check {self.name} does not define judge")

    @staticmethod
    def finding(data: dict[str, Any]) -> Finding:
        """Rebuild a finding from its data in an older report, in which each check stored its findings in a form of its
        own.
        """
        return Finding(data=data)

    @staticmethod
    def contradiction(data: dict[str, Any]) -> tuple[str, str, str] | None:
        """Look for an impossible value in a finding's data that was read from a file.

        Returns three texts: the value's path, the expected value, and the found value. Returns None if all values are
        possible.
        """
        return None
