"""The outcomes of fault injection: a record per fault, and totals over faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from bitproof.harness.errors import UsageError
from bitproof.harness.records.divergence import BlamedCall
from bitproof.harness.records.result import Verdict
from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING

FaultStatus = Literal["killed", "survived", "equal", "flagged", "not struck", "unjudged"]
"""A fault is "killed" if it was found, "survived" if not, and "not struck" if it changed nothing.

A rewrite that keeps every bit (an equivalent) is "equal", or "flagged" if it was reported by mistake. A fault or
equivalent whose runs cannot be compared is "unjudged".
"""


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """The outcome of putting a fault into a case.

    - `is_fault`: False for a rewrite that keeps every bit, which must not be reported as a difference.
    - `says`: the description of the fault.
    - `first`: the first record that differs.
    - `call`: the blamed call.
    - `place_right`, `operator_right`, `rank_right`: whether the blamed call has the module and direction, the operator,
      and the rank that the fault changed. None if this cannot be decided, for example because no call was blamed.
    - `reason`: why a fault was not found or not judged, or how a run failed.
    """

    __pydantic_config__ = GROWING

    fault: str
    family: str
    is_fault: bool
    says: str
    source: str
    case: str
    ranks: int
    steps: int
    status: FaultStatus
    verdict: Verdict | None = None
    kinds: tuple[str, ...] = ()
    kind_right: bool | None = None
    first: str | None = None
    holds: str | None = None
    call: BlamedCall | None = None
    expected: tuple[str, ...] = ()
    place_right: bool | None = None
    operator_right: bool | None = None
    rank_right: bool | None = None
    reason: str | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def is_verified(self) -> bool | None:
        """Whether the blamed call is verified by exchange; None if no call is blamed, or none was to be verified."""
        found = self.call.verification if self.call else None
        return None if found is None else found.status == "verified"

    @property
    def is_blamed_wrong(self) -> bool:
        """Whether module, direction, operator or rank of the blamed call are wrong."""
        return False in (self.place_right, self.operator_right, self.rank_right)


class Share(NamedTuple):
    """The part of a whole that is counted, such as 3 of 4 faults, and the name of what is counted."""

    name: str
    part: int
    whole: int


def share_in_words(part: int, whole: int) -> str:
    """Return a share with its percentage as text, such as `3 of 4 (75%)`; `-` if `whole` is 0."""
    return f"{part} of {whole} ({100 * part / whole:.0f}%)" if whole else "-"


@dataclass(frozen=True, kw_only=True)
class Score:
    """Totals of the outcomes of injected faults.

    - `places`, `operators`, `ranks`: pairs of numbers. The first number counts the faults whose blamed call has the
      right module and direction (`places`), operator, or rank. The second counts the faults for which this can be
      decided.
    - `verified`: the number of blamed calls that an exchange of values verified, and of those that were to be verified.
    - `verified_wrong`: the number of verified calls whose module, direction, operator or rank are wrong.
    - `unjudged`: the number of outcomes that could not be judged.
    - `ended_early`: whether the run stopped before the last fault.
    """

    __pydantic_config__ = GROWING

    faults: Count = 0
    killed: Count = 0
    equivalents: Count = 0
    flagged: Count = 0
    places: tuple[Count, Count] = (0, 0)
    operators: tuple[Count, Count] = (0, 0)
    ranks: tuple[Count, Count] = (0, 0)
    verified: tuple[Count, Count] = (0, 0)
    verified_wrong: Count = 0
    unjudged: Count = 0
    ended_early: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        verified = ""
        if self.verified[1]:
            verified = f"verified {share_in_words(*self.verified)}, verified but wrong {self.verified_wrong}, "
        return (
            f"{self.killed} of {self.faults} faults killed, {self.flagged} of {self.equivalents} equivalents flagged, "
            f"module and direction right in {share_in_words(*self.places)}, "
            f"operator in {share_in_words(*self.operators)}, "
            f"rank in {share_in_words(*self.ranks)}, {verified}{self.seconds:.0f} s"
        )

    @property
    def is_clean(self) -> bool:
        """Whether every fault was found, and no equivalent (a rewrite that keeps every bit) was reported."""
        return self.killed == self.faults and not self.flagged

    @property
    def is_known(self) -> bool:
        """Whether every planned fault was judged."""
        return not (self.unjudged or self.ended_early)

    @property
    def first_impossible_share(self) -> Share | None:
        """The first share whose part exceeds its whole, as only a damaged file can have; None if there is none."""
        shares = (
            Share("killed", self.killed, self.faults),
            Share("flagged", self.flagged, self.equivalents),
            Share("places", *self.places),
            Share("operators", *self.operators),
            Share("ranks", *self.ranks),
            Share("verified", *self.verified),
            Share("verified but wrong", self.verified_wrong, self.verified[0]),
        )
        return next((share for share in shares if share.part > share.whole), None)

    @staticmethod
    def of(outcomes: Sequence[FaultOutcome], *, ended_early: bool = False) -> Score:
        """Return the totals of these outcomes. `ended_early`: the run stopped before the last fault."""
        # "not struck" is in neither list: a fault that changed nothing cannot be found.
        faults = [outcome for outcome in outcomes if outcome.status in ("killed", "survived")]
        equivalents = [outcome for outcome in outcomes if outcome.status in ("equal", "flagged")]

        # A fault counts for a share only if it can be decided (True or False, and not None).
        def share(name: str) -> tuple[int, int]:
            found = [getattr(outcome, name) for outcome in faults]
            return found.count(True), len(found) - found.count(None)

        return Score(
            faults=len(faults),
            killed=sum(outcome.status == "killed" for outcome in faults),
            equivalents=len(equivalents),
            flagged=sum(outcome.status == "flagged" for outcome in equivalents),
            places=share("place_right"),
            operators=share("operator_right"),
            ranks=share("rank_right"),
            verified=share("is_verified"),
            verified_wrong=sum(bool(outcome.is_verified and outcome.is_blamed_wrong) for outcome in faults),
            unjudged=sum(outcome.status == "unjudged" for outcome in outcomes),
            ended_early=ended_early,
            seconds=sum(outcome.seconds for outcome in outcomes),
        )


@dataclass(kw_only=True)
class FaultsFound:
    """The outcomes of a call of `bitproof faults`, or of several such calls that each continued the previous one.

    - `problem`: why the last call ended early; None if it did not.
    - `cpu_seconds`: the CPU time on all cores.
    - `own_digest`: identifies the version of bitproof's code.
    """

    __pydantic_config__ = GROWING

    outcomes: list[FaultOutcome] = field(default_factory=list)
    problem: str | None = None
    cpu_seconds: float | None = None
    calls: int = 1
    own_digest: str | None = None

    @property
    def score(self) -> Score:
        return Score.of(self.outcomes, ended_early=self.problem is not None)

    def of_today(self, own_digest: str) -> FaultsFound:
        """Return a copy, without the faults that could not be judged. `bitproof faults --resume` continues from this
        copy.

        Raises UsageError if the faults were judged by another version of the code, which has another `own_digest`.
        """
        # Outcomes of two versions of the code would be one score of no version.
        if self.own_digest != own_digest:
            raise UsageError(
                "what an earlier call of faults found is of other code",
                expected=f"faults that were judged by this code, {own_digest}",
                found=str(self.own_digest),
                fix="leave out --resume to start again",
            )
        judged = [outcome for outcome in self.outcomes if outcome.status != "unjudged"]
        return replace(self, outcomes=judged, problem=None, calls=self.calls + 1)

    def has(self, fault: str, case: str | None = None) -> bool:
        return any(outcome.fault == fault and case in (None, outcome.case) for outcome in self.outcomes)
