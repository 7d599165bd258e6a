"""A case as a row of a table. Each form of a report shows as many of the columns as fit."""

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
    """A case's cells in a table of cases.

    `outcome` is the verdict with its qualifiers, such as `DIFFERENT (grad)`. `where` is the first divergence, such as
    `step 0, rank 3, grad layers.1.moe.w`.
    """

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
        """The text that follows the verdict in `outcome`, such as ` (grad)`."""
        return self.outcome.removeprefix(self.verdict)

    @property
    def sign(self) -> str:
        """The verdict as one character, such as `=`."""
        return _SIGNS[Verdict(self.verdict)]

    @property
    def sentence(self) -> str:
        """The outcome and the expected verdict: `DIFFERENT (grad), expected EQUAL`."""
        return f"{self.outcome}, expected {self.expectation}"


def row_of(result: CaseResult) -> CaseRow:
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
