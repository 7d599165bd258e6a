"""A case's row. Each form of a report shows as many of its columns as fit."""

from __future__ import annotations

from dataclasses import dataclass

from bitproof.harness.records import CaseResult, Verdict
from bitproof.harness.report import text

_SIGNS = {
    Verdict.EQUAL: "=",
    Verdict.CLOSE: "≈",
    Verdict.DIFFERENT: "≠",
    Verdict.NONDETERMINISTIC: "~",
    Verdict.UNVERIFIED: "?",
    Verdict.ERROR: "!",
}


@dataclass(frozen=True, kw_only=True)
class CaseRow:
    """A case in a line. `outcome` is the verdict with its qualifiers, such as `DIFFERENT (grad)`; `where` is the first
    divergence."""

    name: str
    verdict: str
    outcome: str
    expectation: str
    as_expected: bool
    place: str
    systems: str
    compared: int
    mismatched: int
    seconds: float
    where: str

    @property
    def detail(self) -> str:
        """The outcome without the verdict."""
        return self.outcome.removeprefix(self.verdict)

    @property
    def sign(self) -> str:
        """The verdict as one character."""
        return _SIGNS[Verdict(self.verdict)]

    @property
    def sentence(self) -> str:
        """The case's verdict and its expected verdict."""
        return f"{self.outcome}, expected {self.expectation}"


def row_of(result: CaseResult) -> CaseRow:
    """A case's row."""
    return CaseRow(
        name=result.case.name,
        verdict=result.verdict.value,
        outcome=text.outcome(result),
        expectation=text.expectation(result),
        as_expected=result.as_expected,
        place=text.place(result),
        systems=text.systems(result),
        compared=sum(result.compared.values()),
        mismatched=sum(result.mismatched.values()),
        seconds=text.total_seconds(result),
        where=text.locate(result.first_divergence, result.case),
    )
