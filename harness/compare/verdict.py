"""Judge two recordings of a case.

EQUAL needs complete evidence: at every step, on every rank, at least a loss, a gradient, a parameter and an optimizer
state, the same names at every step, all seen on both sides, and every digest the same. Any gap makes the verdict
UNVERIFIED, even if the present records agree or differ; so does agreement that shows nothing (`vacuity.py`), if there
is no difference. CLOSE needs the same evidence, some bits that differ, a case that states a bound, and the values of
every tensor, measured to be within it.

1. Refuse recordings that were not made from this case (`same_case.py`), or of systems that chunked other modules.
2. Pair records; name the gaps.
3. Compare dtype and shape, then digests.
4. Find the first divergence in the order in which a step computes.
5. Apply the controls: a system that differs from itself proves nothing about another.
6. If the case states a bound, apply the values: CLOSE or DIFFERENT, or a DIFFERENT of the expected size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bitproof.harness.case import KINDS, Case, Kind
from bitproof.harness.compare.chunked import unlike_chunks
from bitproof.harness.compare.differing_settings import differing_settings, setting_sentences
from bitproof.harness.compare.layout_verdict import decide_by_layout, first_beyond, remarks_on, told_without_call
from bitproof.harness.compare.same_case import contradictions, unlike_digests
from bitproof.harness.compare.vacuity import compiled_runs, unshown_state, vacuous_runs
from bitproof.harness.records import (
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
SHARDED_OTHERWISE = (
    "nothing can be compared with the case's bound of {:g}: elements of tensors that are sharded otherwise have no "
    "partners; have both systems show whole tensors, as by DTensor.full_tensor()"
)
UNSHARED = "state of one system has nothing to be compared with"
RACES = "a graph races with its collectives or copies, so that its bits agree by luck, if they do"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A comparison after its controls were applied: the fields of a CaseResult that follow from evidence."""

    verdict: Verdict
    compared: dict[str, int]
    mismatched: dict[str, int]
    differing_kinds: tuple[Kind, ...]
    first_divergence: Divergence | None
    control: dict[Role, str | None]
    error: str | None
    closeness: Closeness | None = None
    layouts: LayoutBounds | None = None
    stress: dict[Role, str | None] | None = None
    differing: Differing = field(default_factory=dict)
    differing_left_out: int = 0
    remarks: tuple[str, ...] = ()

    def with_error(self, text: str) -> Judgement:
        """The same, with a further error."""
        return replace(self, error=f"{self.error}\n{text}" if self.error else text)


class Repeat(NamedTuple):
    """A system's run compared with another of its runs: a plain run, or a run under stress."""

    side: Role
    stressed: bool
    comparison: Comparison

    @property
    def between(self) -> str:
        """The value of `Divergence.between`."""
        return f"{self.side} against itself{' under stress' if self.stressed else ''}"

    def divergence(self) -> Divergence | None:
        """The first divergence of the system from itself."""
        first = self.comparison.first_divergence
        return first and replace(first, between=self.between)


def compare(reference: Recording, candidate: Recording, case: Case) -> Comparison:
    """Compare two recordings of `case`. EQUAL, DIFFERENT or UNVERIFIED; never raises for missing records."""
    reasons = [*contradictions("reference", reference, case), *contradictions("candidate", candidate, case)]
    if reasons := [*reasons, *unlike_digests(reference, candidate), *unlike_chunks(reference, candidate)]:
        return Comparison(verdict=Verdict.UNVERIFIED, reason=_tell("the recordings are not comparable", reasons))
    from bitproof.harness.compare.evidence import evidence_of  # loads pyarrow

    ranks = reference.manifest.ranks or (), candidate.manifest.ranks or ()
    sides, evidence = {"reference": reference, "candidate": candidate}, evidence_of(reference, candidate, case)
    gaps, first, differing = evidence.gaps, evidence.first, evidence.differing
    return Comparison(
        verdict=Verdict.UNVERIFIED if gaps else Verdict.DIFFERENT if evidence.num_differing else Verdict.EQUAL,
        compared=evidence.compared,
        mismatched=dict.fromkeys(evidence.compared, 0) | dict(evidence.mismatched),
        differing_kinds=_kinds(evidence.kinds[first.key.step]) if first else (),
        first_divergence=first.divergence if first else None,
        layout_mismatches=evidence.layouts,
        is_sharded_otherwise=evidence.is_sharded_otherwise,
        reason=_tell("the evidence is incomplete", gaps) if gaps else None,
        differing=group_keys(differing),
        differing_left_out=evidence.num_differing - len(differing),
        vacuous=(
            *evidence.shown.vacuous_steps(case),
            *(told for side in sides for told in vacuous_runs(side, sides[side].manifest)),
        ),
        unshared=(*evidence.one_sided.unshown(),),
        remarks=(
            *evidence.one_sided.remarks(),
            *evidence.shown.vacuous_tensors(),
            *(told for side in sides for told in compiled_runs(side, sides[side].manifest)),
            *(told for side in sides for told in unshown_state(side, sides[side].manifest)),
            *(setting_sentences(differing_settings(*ranks, first.key.step)) if first else ()),
        ),
    )


def demand_substance(comparison: Comparison) -> Comparison:
    """The comparison; an EQUAL becomes UNVERIFIED if the agreement shows nothing, or not everything was compared."""
    if comparison.verdict == Verdict.EQUAL and (reasons := _reasons_against(comparison)):
        return replace(comparison, verdict=Verdict.UNVERIFIED, reason="\n".join(reasons))
    return comparison


def _reasons_against(comparison: Comparison) -> list[str]:
    """Why agreement is no evidence for two systems."""
    found = {VACUOUS: comparison.vacuous, UNSHARED: comparison.unshared}
    return [_tell(what, details) for what, details in found.items() if details]


def judge(
    case: Case,
    comparison: Comparison,
    *,
    reference_control: Comparison | None = None,
    candidate_control: Comparison | None = None,
    closeness: Closeness | None = None,
    layouts: LayoutBounds | None = None,
    have_partners: bool = False,
    reference_stress: Comparison | None = None,
    candidate_stress: Comparison | None = None,
    races: Sequence[str] = (),
) -> Judgement:
    """Combine a comparison with its controls, each a system compared with itself, and with measured values.

    - If a control or a run under stress lacks evidence, the case is UNVERIFIED. If its system differs from itself, the
      case is NONDETERMINISTIC, with the first divergence of the system from itself. Without a control, the result's
      field for it is None.
    - `closeness`: a case with a bound whose systems differ is UNVERIFIED without it, unless dtypes or shapes differ, as
      then there is nothing to measure.
    - `races` withdraw agreement. A graph races if it reads the result of a collective or a copy, or writes its input,
      before anything waits for it. If a system differs from itself, its races are listed beside that.
    - A case's bound does not apply to two layouts: the case is UNVERIFIED if differing tensors have different
      placements. With `layouts` the bounds are measured, and a difference within all of them is CLOSE. No call is
      blamed, unless calls of both sides have partners (`lack_parts_alone`).
    """
    controls = {"reference": reference_control, "candidate": candidate_control}
    stresses = {"reference": reference_stress, "candidate": candidate_stress}
    ran = repeats(controls, stresses)
    unverified = [repeat for repeat in ran if repeat.comparison.verdict == Verdict.UNVERIFIED]
    unstable = [repeat for repeat in ran if repeat.comparison.verdict not in (Verdict.EQUAL, Verdict.UNVERIFIED)]
    if not unstable:  # nondeterminism takes precedence over vacuous agreement
        comparison = demand_substance(comparison)

    texts = [comparison.reason] if comparison.reason else []
    texts += [_tell_repeat(repeat, getattr(case, repeat.side)) for repeat in unverified + unstable]
    if comparison.layout_mismatches:
        what = "dtypes, shapes or placements" if comparison.is_sharded_otherwise else "dtypes or shapes"
        texts.append(_tell(f"{what} differ", comparison.layout_mismatches))

    verdict = Verdict.NONDETERMINISTIC if unstable else comparison.verdict
    if comparison.verdict == Verdict.UNVERIFIED or unverified:
        verdict = Verdict.UNVERIFIED
    first = unstable[0].divergence() if verdict == Verdict.NONDETERMINISTIC else comparison.first_divergence
    if verdict == Verdict.DIFFERENT:
        verdict, measured, beyond = _measured(case, comparison, closeness, layouts)
        texts, first = texts + measured, beyond or first
    # Vacuous agreement is no evidence for CLOSE either.
    if verdict == Verdict.CLOSE and (reasons := _reasons_against(comparison)):
        verdict, texts = Verdict.UNVERIFIED, [*texts, *reasons]
    if verdict in (Verdict.EQUAL, Verdict.CLOSE) and races:
        verdict, texts = Verdict.UNVERIFIED, [*texts, _tell(RACES, races)]
    elif verdict == Verdict.NONDETERMINISTIC and races:
        texts = [*texts, _tell(RACES, races)]
    # If a control differs no bound is measured, and the first record that differs may do so by rounding.
    is_beyond = layouts and verdict == Verdict.DIFFERENT and (layouts.samples or not layouts.regrouped)
    without_call = [told_without_call(first)] if is_beyond and first and not have_partners else []
    near = remarks_on(layouts) if layouts and verdict == Verdict.CLOSE else []
    return Judgement(
        verdict=verdict,
        compared=dict(comparison.compared),
        mismatched=dict(comparison.mismatched),
        differing_kinds=comparison.differing_kinds,
        first_divergence=first,
        control=_verdicts(controls),
        error="\n".join(texts) or None,
        closeness=closeness,
        layouts=layouts,
        stress=_verdicts(stresses) if any(stresses.values()) else None,
        differing=comparison.differing,
        differing_left_out=comparison.differing_left_out,
        remarks=(*comparison.remarks, *without_call, *near),
    )


def _measured(
    case: Case, comparison: Comparison, closeness: Closeness | None, layouts: LayoutBounds | None
) -> tuple[Verdict, list[str], Divergence | None]:
    """The verdict on systems that differ, from bounds on their values; the reasons; the first tensor beyond its
    bound."""
    verdict, texts, beyond = Verdict.DIFFERENT, list[str | None](), None
    if case.bound is not None and not comparison.layout_mismatches:
        verdict, text = _decide(case.bound, case.close_within is not None, closeness)
        texts.append(text)
    if case.bound is not None and comparison.is_sharded_otherwise:
        return Verdict.UNVERIFIED, [SHARDED_OTHERWISE.format(case.bound)], None
    if verdict == Verdict.DIFFERENT and layouts is not None and not comparison.layout_mismatches:
        verdict, text = decide_by_layout(layouts)
        texts.append(text)
        beyond = first_beyond(layouts, comparison)
    return verdict, [text for text in texts if text], beyond


Comparisons = Mapping[Any, Comparison | None]
"""The comparison of each side's runs with each other, by side; None for a side that ran once."""


def repeats(controls: Comparisons, stresses: Comparisons) -> list[Repeat]:
    """Every system that was compared with itself, in the order of reports: plain before stressed."""
    return [
        Repeat(side, stressed, comparison)
        for stressed, comparisons in ((False, controls), (True, stresses))
        for side, comparison in comparisons.items()
        if comparison is not None
    ]


def _verdicts(comparisons: Comparisons) -> dict[Role, str | None]:
    return {side: comparison.verdict.value if comparison else None for side, comparison in comparisons.items()}


def _kinds(found: set[str]) -> tuple[Kind, ...]:
    return tuple(kind for kind in KINDS if kind in found)


# 5. Apply the controls.


def _tell_repeat(repeat: Repeat, system: str) -> str:
    """A sentence on how two runs of the same system differ."""
    comparison, first = repeat.comparison, repeat.comparison.first_divergence
    who = f"{repeat.side} {system}"
    head = f"control of {who} under stress" if repeat.stressed else f"control of {who}"
    if comparison.verdict == Verdict.UNVERIFIED:
        return f"{head}: {comparison.reason}"
    where = f", first at step {first.step}, rank {first.rank}, {first.kind} {first.name}" if first else ""
    runs = "a plain and a stressed run" if repeat.stressed else "two runs"
    return f"{head}: {runs} of one system differ{where}"


# 6. If the case states a bound, apply the values.


def _decide(bound: float, may_be_close: bool, closeness: Closeness | None) -> tuple[Verdict, str | None]:
    """The verdict by a case's bound: CLOSE within it, if the case allows that, else DIFFERENT; UNVERIFIED without
    measured values.

    Also a sentence, except for values within the bound.
    """
    if closeness is None or closeness.bound != bound:
        return Verdict.UNVERIFIED, f"bits differ, and no values were measured against the case's bound of {bound:g}"
    if closeness.is_within:
        return Verdict.CLOSE if may_be_close else Verdict.DIFFERENT, None
    key, error = closeness.first_beyond, closeness.first_beyond_error
    assert key is not None
    size = "infinite" if error is None else f"{error:.3g}"
    return Verdict.DIFFERENT, (
        f"the relative error of step {key.step}, rank {key.rank}, {key.kind} {key.name} is {size}, beyond the case's "
        f"bound of {bound:g}; {closeness.tensors_beyond} tensors are beyond it, and this is the first"
    )


def races_beside(judgement: Judgement, races: Iterable[str]) -> list[str]:
    """The races of a graph, if systems differ and no call to blame was found."""
    first = judgement.first_divergence
    return [f"a graph races, which may be the cause: {race}" for race in races] if first and first.call is None else []


def _tell(what: str, details: Iterable[str]) -> str:
    return "\n".join([what, *(f"  {detail}" for detail in _first_few(details))])


def _first_few(details: Iterable[str], limit: int = 20) -> list[str]:
    details = list(details)
    return details[:limit] + ([f"and {len(details) - limit} more"] if len(details) > limit else [])
