"""Whether a case's result carries its own verdict: one rule for results that were judged here and those read from disk.

A verdict that its own numbers contradict is worse than none. What is demanded follows from how verdicts are made:

- whoever is judged ran the case's steps on its ranks, with a loss a step on rank 0 of either side, and at every step
  on every rank a record of each required kind, the same at every step;
- EQUAL and CLOSE have no error, EQUAL nothing that differs and equal losses, CLOSE values within the case's bound;
- DIFFERENT has records that differ, of the kinds that it lists;
- neither of the three goes with a control, or a run under stress, that differs from its first run;
- a baseline is EQUAL where records were compared and none differs, DRIFTED where one does;
- of a step's calls no more are tried than there are, and each that was seen, or is blind, was tried, and is not both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.records import UNLIKE, BaselineStatus, CaseResult, Report, Verdict, required_kinds

_DECIDED = (Verdict.EQUAL, Verdict.CLOSE, Verdict.DIFFERENT)
_COMPARED = (*_DECIDED, Verdict.NONDETERMINISTIC)


class Contradiction(NamedTuple):
    """A field of a result that the rest of it contradicts."""

    field: str
    expected: str
    found: object


def contradiction(result: CaseResult) -> Contradiction | None:
    """The first field of a result that contradicts the others; None when they agree."""
    return next(_contradictions(result), None)


def contradiction_in(report: Report) -> Contradiction | None:
    """The first field of a report as a whole that contradicts the others; None when they agree."""
    if ran := sorted(report.not_run.keys() & {result.case.name for result in report.cases}):
        return Contradiction("not_run", "cases that have no result", ran[0])
    for case in report.shard.selection if report.shard else ():
        if case.name in report.not_run and case.requires is None:
            return Contradiction("not_run", "cases that require a device", case.name)
    if found := report.faults and report.faults.overfull:
        return Contradiction(f"faults.{found.name}", f"at most {found.whole}", found.part)
    return None


def _contradictions(result: CaseResult) -> Iterator[Contradiction]:
    case, verdict = result.case, result.verdict
    if result.steps != case.steps:
        yield Contradiction("steps", f"{case.steps}, by its case", result.steps)
    if result.world_size != case.parallelism.world_size:
        yield Contradiction("world_size", f"{case.parallelism.world_size}, by its case", result.world_size)
    if result.differing or result.differing_left_out:
        yield from _miscounted(result)
    if verdict in _COMPARED:
        yield from _incomplete(result)
    if verdict == Verdict.EQUAL:
        yield from _unfounded_equal(result)
    if verdict == Verdict.CLOSE:
        yield from _unfounded_close(result)
    if verdict == Verdict.DIFFERENT:
        yield from _unfounded_different(result)
    repeated = [found for verdicts in (result.control, result.stress or {}) for found in verdicts.values()]
    unstable = [found for found in repeated if found not in (None, Verdict.EQUAL)]
    if unstable and verdict in _DECIDED:
        yield _no(result, f"as a control is {unstable[0]}")
    yield from _unfounded_baselines(result)
    yield from _miscounted_calls(result)
    for kind, count in result.mismatched.items():
        compared = result.compared.get(kind, 0)
        if count > compared:
            yield Contradiction(f"mismatched.{kind}", f"{compared} at most, as many as compared", count)


def _no(result: CaseResult, why: str) -> Contradiction:
    return Contradiction("verdict", f"no {result.verdict}, {why}", result.verdict.value)


def _incomplete(result: CaseResult) -> Iterator[Contradiction]:
    """Less than two systems leave that ran to the end."""
    places = result.steps * result.world_size
    required = required_kinds(result.case)
    for kind, count in (dict.fromkeys(required, 0) | result.compared).items():
        if kind in required and not count:
            yield _no(result, "as a kind was not compared")
        if kind in required and count < places:
            yield Contradiction(f"compared.{kind}", f"at least {places}, one for each step and rank", count)
        if count % result.steps:
            yield Contradiction(f"compared.{kind}", f"as many at each of {result.steps} steps", count)
    for side, losses in result.losses.items():
        if not losses or len(losses) % result.steps:
            yield Contradiction(f"losses.{side}", f"as many at each of {result.steps} steps", len(losses))


def _unfounded_equal(result: CaseResult) -> Iterator[Contradiction]:
    if any(result.mismatched.values()) or result.differing_kinds or result.first_divergence is not None:
        yield _no(result, "as records differ")
    if result.losses["reference"] != result.losses["candidate"]:
        yield _no(result, "as losses differ")
    if result.error is not None:
        yield _no(result, "as there is an error")


def _unfounded_close(result: CaseResult) -> Iterator[Contradiction]:
    """CLOSE needs a bound, something that differs, and values of every compared kind measured within the bound."""
    bound, closeness = result.case.close_within, result.closeness
    if bound is None:
        yield _no(result, "as the case states no bound")
    elif closeness is None or closeness.bound != bound or not closeness.is_within:
        yield _no(result, f"as no evidence shows every tensor within {bound:g}")
    elif not any(result.mismatched.values()):
        yield _no(result, "as no record differs")
    elif result.error is not None:
        yield _no(result, "as there is an error")
    else:
        yield from _unfounded_closeness(result)


def _unfounded_different(result: CaseResult) -> Iterator[Contradiction]:
    if not any(result.mismatched.values()):
        yield _no(result, "as no record differs")
    for kind in result.differing_kinds:
        if not result.mismatched.get(kind):
            yield Contradiction("differing_kinds", "kinds of records that differ", kind)
    if result.closeness is not None and result.case.differs_within is not None and not result.is_beyond_bound:
        yield from _unfounded_closeness(result)


def _unfounded_closeness(result: CaseResult) -> Iterator[Contradiction]:
    """A measurement within the bound that is not of all that was compared, or that says something else elsewhere."""
    found = result.closeness
    assert found is not None
    if {kind for kind, count in result.compared.items() if count} != found.histogram.keys():
        yield _no(result, "as the histogram lacks a compared kind")
    if any(UNLIKE in buckets for buckets in found.histogram.values()):
        yield _no(result, "as elements are unlike")
    if found.first_beyond is not None:
        yield Contradiction("closeness.first_beyond", "none, as no tensor is beyond the bound", found.first_beyond.name)


def _unfounded_baselines(result: CaseResult) -> Iterator[Contradiction]:
    for role, found in result.baseline.items():
        field, status = f"baseline.{role}.status", found.status
        if status == BaselineStatus.EQUAL and (not found.compared or found.mismatched or found.drift):
            yield Contradiction(field, "no EQUAL, as records differ or none was compared", status.value)
        if status == BaselineStatus.DRIFTED and not found.mismatched:
            yield Contradiction(field, "no DRIFTED, as no record differs", status.value)


def _miscounted_calls(result: CaseResult) -> Iterator[Contradiction]:
    for index, row in enumerate(result.sensitivity.rows if result.sensitivity else ()):
        if not row.at_once <= row.seen <= row.tried - row.blind <= row.calls - row.blind:
            told = f"{row.at_once} at once of {row.seen} seen, {row.blind} blind, {row.tried} tried of {row.calls}"
            yield Contradiction(f"sensitivity.rows[{index}]", "at_once <= seen <= tried - blind, tried <= calls", told)


def _miscounted(result: CaseResult) -> Iterator[Contradiction]:
    """Differing keys must lie within the case, and be as many as the mismatched records."""
    places = [
        (kind, int(step), rank)
        for kind, names in result.differing.items()
        for steps in names.values()
        for step, ranks in steps.items()
        for rank in ranks
    ]
    expected = sum(result.mismatched.values())
    if len(places) + result.differing_left_out != expected:
        yield Contradiction("differing", f"{expected} keys, by the mismatched records", len(places))
    for kind, step, rank in places:
        if step >= result.steps or rank >= result.world_size:
            yield Contradiction(f"differing.{kind}", "steps and ranks of the case", f"step {step}, rank {rank}")
