"""Compare two recordings of a case, and combine all findings into its verdict.

- EQUAL: complete evidence, and every digest is the same. Complete evidence is a loss, a gradient, a parameter and an
  optimizer state on every rank at every step. Names are the same at every step and in both recordings.
- CLOSE: complete evidence, some bits that differ, and the values of every tensor within the case's bound.
- UNVERIFIED: any gap in the evidence, whether the other records agree or differ. Also, if nothing differs, agreement
  that is no evidence, such as tensors of zeros (`vacuity.py`).

Steps:

1. Refuse recordings of another case (`same_case.py`), or of systems that run other modules in chunks.
2. Pair records, and name the gaps.
3. Compare dtype and shape, then digests.
4. Find the first divergence in the order in which a step computes.

The checks in `execute/checks/case_checks.py` then turn this comparison into the case's verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bitproof.harness.case import KINDS, Case, Kind
from bitproof.harness.compare.chunked import unlike_chunks
from bitproof.harness.compare.differing_settings import differing_settings, setting_sentences
from bitproof.harness.compare.same_case import contradictions, unlike_digests
from bitproof.harness.compare.vacuity import compiled_runs, unshown_state, vacuous_runs
from bitproof.harness.records import (
    ROLES,
    Closeness,
    Comparison,
    Differing,
    Divergence,
    LayoutBounds,
    Recording,
    Role,
    Verdict,
    group_keys,
)

VACUOUS = "what agrees shows nothing, so it is no evidence"
UNSHARED = "state of one system has nothing to be compared with"
RACES = "a graph races with its collectives or copies, so that its bits agree by luck, if they do"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on a case so far, with the findings that led to it. The fields are as in CaseResult.

    Each check of the case (`execute/checks/case_checks.py`) takes a judgement and returns the next one.
    """

    verdict: Verdict
    compared: dict[str, int]
    mismatched: dict[str, int]
    differing_kinds: tuple[Kind, ...]
    first_divergence: Divergence | None
    control: dict[Role, str | None] = field(default_factory=lambda: dict.fromkeys(ROLES))
    error: str | None = None
    closeness: Closeness | None = None
    layouts: LayoutBounds | None = None
    stress: dict[Role, str | None] | None = None
    differing: Differing = field(default_factory=dict)
    differing_left_out: int = 0
    remarks: tuple[str, ...] = ()

    def with_error(self, text: str) -> Judgement:
        """Return this judgement with a further error and the same verdict."""
        return replace(self, error=f"{self.error}\n{text}" if self.error else text)

    def unverified(self, text: str) -> Judgement:
        """Return this judgement with the verdict UNVERIFIED, and `text` as the reason."""
        return replace(self.with_error(text), verdict=Verdict.UNVERIFIED)


class Repeat(NamedTuple):
    """The comparison of a system's second run with its first.

    With `stressed`, the second run has random sleeps and other values in uninitialized memory. Otherwise it has the
    settings of the first.
    """

    side: Role
    stressed: bool
    comparison: Comparison

    @property
    def between(self) -> str:
        """The text for `Divergence.between`, such as "candidate against itself under stress"."""
        return f"{self.side} against itself{' under stress' if self.stressed else ''}"

    def divergence(self) -> Divergence | None:
        first = self.comparison.first_divergence
        return first and replace(first, between=self.between)


def compare(reference: Recording, candidate: Recording, case: Case) -> Comparison:
    """Compare two recordings of `case`; the verdict is EQUAL, DIFFERENT or UNVERIFIED.

    If records are missing, or a recording is of another case, the verdict is UNVERIFIED; no exception is raised.
    """
    # Recordings of other cases would only differ for that reason, so nothing else is compared.
    reasons = [*contradictions("reference", reference, case), *contradictions("candidate", candidate, case)]
    if reasons := [*reasons, *unlike_digests(reference, candidate), *unlike_chunks(reference, candidate)]:
        return Comparison(verdict=Verdict.UNVERIFIED, reason=with_details("the recordings are not comparable", reasons))
    from bitproof.harness.compare.evidence import evidence_of  # loads pyarrow

    ranks = reference.manifest.ranks or (), candidate.manifest.ranks or ()
    sides, evidence = {"reference": reference, "candidate": candidate}, evidence_of(reference, candidate, case)
    # Gaps come first: with incomplete evidence, neither agreement nor a difference is a verdict.
    gaps, first, differing = evidence.gaps, evidence.first, evidence.differing
    return Comparison(
        verdict=Verdict.UNVERIFIED if gaps else Verdict.DIFFERENT if evidence.num_differing else Verdict.EQUAL,
        compared=evidence.compared,
        mismatched=dict.fromkeys(evidence.compared, 0) | dict(evidence.mismatched),
        differing_kinds=tuple(kind for kind in KINDS if kind in evidence.kinds[first.key.step]) if first else (),
        first_divergence=first.divergence if first else None,
        layout_mismatches=evidence.layouts,
        is_sharded_otherwise=evidence.is_sharded_otherwise,
        reason=with_details("the evidence is incomplete", gaps) if gaps else None,
        differing=group_keys(differing),
        differing_left_out=evidence.num_differing - len(differing),
        vacuous=(
            *evidence.shown.vacuous_steps(case),
            *(each for side in sides for each in vacuous_runs(side, sides[side].manifest)),
        ),
        unshared=(*evidence.one_sided.unshown(),),
        remarks=(
            *evidence.one_sided.remarks(),
            *evidence.shown.vacuous_tensors(),
            *(each for side in sides for each in compiled_runs(side, sides[side].manifest)),
            *(each for side in sides for each in unshown_state(side, sides[side].manifest)),
            *(setting_sentences(differing_settings(*ranks, first.key.step)) if first else ()),
        ),
    )


def demand_substance(comparison: Comparison) -> Comparison:
    if comparison.verdict == Verdict.EQUAL and (reasons := reasons_against(comparison)):
        return replace(comparison, verdict=Verdict.UNVERIFIED, reason="\n".join(reasons))
    return comparison


def reasons_against(comparison: Comparison) -> list[str]:
    """Return the reasons why the agreement of two systems is no evidence, as texts. Further lines of a text have
    details.
    """
    found = {VACUOUS: comparison.vacuous, UNSHARED: comparison.unshared}
    return [with_details(what, details) for what, details in found.items() if details]


def judgement_of(comparison: Comparison) -> Judgement:
    """Return the judgement that follows from the comparison alone, before any check of the case."""
    texts = [comparison.reason] if comparison.reason else []
    if comparison.layout_mismatches:
        what = "dtypes, shapes or placements" if comparison.is_sharded_otherwise else "dtypes or shapes"
        texts.append(with_details(f"{what} differ", comparison.layout_mismatches))
    shared = {name for name in Judgement.__dataclass_fields__ if name in Comparison.__dataclass_fields__}
    return Judgement(**{name: getattr(comparison, name) for name in shared}, error="\n".join(texts) or None)


def with_repeats(judgement: Judgement, case: Case, comparison: Comparison, repeats: Sequence[Repeat]) -> Judgement:
    """Return a judgement that takes account of `repeats`: comparisons of each system's second run with its first.

    - If a second run is missing evidence, the case becomes UNVERIFIED.
    - If a system differs from itself, the case becomes NONDETERMINISTIC, and its first divergence is that of the system
      from itself. But an UNVERIFIED case stays UNVERIFIED.
    """
    verdicts = dict.fromkeys(ROLES) | {each.side: each.comparison.verdict.value for each in repeats}
    are_stressed = any(each.stressed for each in repeats)
    judgement = replace(judgement, stress=verdicts) if are_stressed else replace(judgement, control=verdicts)
    unverified = [each for each in repeats if each.comparison.verdict == Verdict.UNVERIFIED]
    unstable = [each for each in repeats if each.comparison.verdict not in (Verdict.EQUAL, Verdict.UNVERIFIED)]
    for repeat in unverified + unstable:
        judgement = judgement.with_error(_describe_repeat(repeat, getattr(case, repeat.side)))
    if unverified:
        return replace(judgement, verdict=Verdict.UNVERIFIED, first_divergence=comparison.first_divergence)
    # An earlier verdict of the same kind keeps its first divergence.
    if unstable and judgement.verdict not in (Verdict.UNVERIFIED, Verdict.NONDETERMINISTIC):
        return replace(judgement, verdict=Verdict.NONDETERMINISTIC, first_divergence=unstable[0].divergence())
    return judgement


def _describe_repeat(repeat: Repeat, system: str) -> str:
    comparison, first = repeat.comparison, repeat.comparison.first_divergence
    who = f"{repeat.side} {system}"
    head = f"control of {who} under stress" if repeat.stressed else f"control of {who}"
    if comparison.verdict == Verdict.UNVERIFIED:
        return f"{head}: {comparison.reason}"
    where = f", first at step {first.step}, rank {first.rank}, {first.kind} {first.name}" if first else ""
    runs = "a plain and a stressed run" if repeat.stressed else "two runs"
    return f"{head}: {runs} of one system differ{where}"


def with_details(what: str, details: Iterable[str]) -> str:
    """Return the sentence `what`, followed by up to 20 `details`, a line each, and "and N more" if there are more."""
    return "\n".join([what, *(f"  {detail}" for detail in _first_few(details))])


def _first_few(details: Iterable[str], limit: int = 20) -> list[str]:
    details = list(details)
    return details[:limit] + ([f"and {len(details) - limit} more"] if len(details) > limit else [])
