"""Check that the numbers in a case's result support its verdict.

The same rules apply to new results and to results that are read from a file. For example, EQUAL needs equal losses and
no differing record, and CLOSE needs measured values within the case's bound. A difference needs a first divergence
within the case's steps and ranks. The report itself needs a remark for each option that weakens its claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, get_args

from bitproof.harness.case import PREPARED
from bitproof.harness.records import (
    UNLIKE,
    CaseResult,
    ChainLink,
    LayoutBounds,
    Report,
    TensorDifference,
    Verdict,
    Verification,
    VerificationStatus,
    needs_one_rank,
    required_kinds,
)

_DECIDED = (Verdict.EQUAL, Verdict.CLOSE, Verdict.DIFFERENT)
_COMPARED = (*_DECIDED, Verdict.NONDETERMINISTIC)


class Contradiction(NamedTuple):
    """A field of a result whose value `found` contradicts the other fields. `expected` describes a valid value."""

    field: str
    expected: str
    found: object


def contradiction(result: CaseResult) -> Contradiction | None:
    """Return the first field of a result that contradicts its other fields; None if they are consistent."""
    return next(_contradictions(result), None)


def contradiction_in(report: Report) -> Contradiction | None:
    """Return the first contradiction in a report's own fields; None if they are consistent.

    The results in the report are not checked here (see `contradiction`).
    """
    if twice := [name for name, count in Counter(result.case.name for result in report.cases).items() if count > 1]:
        return Contradiction("cases", "one result a case", twice[0])
    if ran := sorted(report.not_run.keys() & {result.case.name for result in report.cases}):
        return Contradiction("not_run", "cases that have no result", ran[0])
    # Only the case itself can justify that it was not run.
    requires = {
        case.name: case.requires for case in (*(report.shard.selection if report.shard else ()), *report.left_out)
    }
    for name in report.not_run:
        if requires.get(name) is None:
            return Contradiction("not_run", "cases that require a device or a package, which the report has", name)
    if found := _missing_remark(report):
        return found
    if share := report.faults and report.faults.first_impossible_share:
        return Contradiction(f"faults.{share.name}", f"at most {share.whole}", share.part)
    return None


_NEEDS_REMARK = ("--no-control", "--stress", "--share-gpus")
"""Options that a report must mention in a remark."""


def _missing_remark(report: Report) -> Contradiction | None:
    # A remark on an option begins with the option. A merged case has options of its own.
    mentioned = [remark.partition(":")[0] for remark in report.remarks]
    options = {*report.options, *(option for result in report.cases for option in result.options or ())}
    for option in _NEEDS_REMARK:
        if option in options and option not in mentioned:
            return Contradiction("remarks", f"a remark on {option}, which is among the options", None)
    for index, result in enumerate(report.cases):
        is_alone = result.verdict in _DECIDED and None in result.control.values()
        if is_alone and not {"--no-control", "--control"} & {*mentioned, *options}:
            return Contradiction(f"cases[{index}].control", "two runs of each system, or a remark that says why", None)
    return None


def _contradictions(result: CaseResult) -> Iterator[Contradiction]:
    # The first contradiction is reported, so facts about the whole case come before those that follow from them.
    case, verdict = result.case, result.verdict
    if result.steps != case.steps:
        yield Contradiction("steps", f"{case.steps}, by its case", result.steps)
    if result.world_size != case.parallelism.world_size:
        yield Contradiction("world_size", f"{case.parallelism.world_size}, by its case", result.world_size)
    if result.backend == "nccl" and result.device != "cuda":
        yield Contradiction("backend", f"no nccl on {result.device}", result.backend)
    times = [found for known in result.seconds.known().values() for found in _numbers(known)]
    if (least := min([*times, *(each.seconds for each in result.passes)], default=0.0)) < 0:
        yield Contradiction("seconds", "no time below 0", least)
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
    # None for a system that ran once, which a remark must explain.
    repeated = [found for verdicts in (result.control, result.stress or {}) for found in verdicts.values()]
    unstable = [found for found in repeated if found not in (None, Verdict.EQUAL)]
    if unstable and verdict in _DECIDED:
        yield _not_supported(result, f"as a control is {unstable[0]}")
    if verdict == Verdict.NONDETERMINISTIC and not unstable:
        yield _not_supported(result, "as no control differs")
    yield from _misplaced(result)
    for kind, count in result.mismatched.items():
        compared = result.compared.get(kind, 0)
        if count > compared:
            yield Contradiction(f"mismatched.{kind}", f"{compared} at most, as many as compared", count)


def _numbers(known: float | dict[str, float | None]) -> list[float]:
    return [found for found in (known.values() if isinstance(known, dict) else [known]) if found is not None]


def _not_supported(result: CaseResult, why: str) -> Contradiction:
    return Contradiction("verdict", f"no {result.verdict}, {why}", result.verdict.value)


def _incomplete(result: CaseResult) -> Iterator[Contradiction]:
    # A place is a step on a rank. A kind that a single rank may record needs one record per step, any
    # other one per place.
    # A complete run has records of every required kind, equally often at each step.
    steps = len(result.case.compared_steps)
    places = steps * result.world_size
    required = required_kinds(result.case)
    for kind, count in (dict.fromkeys(required, 0) | result.compared).items():
        if kind in required and not count:
            yield _not_supported(result, "as a kind was not compared")
        least, each = (steps, "step") if needs_one_rank(kind, result.case) else (places, "step and rank")
        if kind in required and count < least:
            yield Contradiction(f"compared.{kind}", f"at least {least}, one for each {each}", count)
        if count % steps:
            yield Contradiction(f"compared.{kind}", f"as many at each of {steps} steps", count)
    for side, losses in result.losses.items():
        if len(losses) % steps or not (losses or needs_one_rank("loss", result.case)):
            yield Contradiction(f"losses.{side}", f"as many at each of {steps} steps", len(losses))

    lengths = [len(losses) for losses in result.losses.values()]
    if len({*lengths}) > 1:
        yield Contradiction("losses", "as many on both sides", lengths)
    # The report has the losses of rank 0 alone; each other rank records at least one at each step.
    elsewhere = 0 if needs_one_rank("loss", result.case) else places - steps
    if lengths and result.compared.get("loss", 0) < (least := lengths[0] + elsewhere):
        yield Contradiction("compared.loss", f"at least {least}, by the losses of rank 0", result.compared["loss"])
    if {result.case.reference, result.case.candidate} <= _BUILT_IN:
        yield from _uneven(result)


_BUILT_IN = {"eager", "eager_chunked", *PREPARED}


def _uneven(result: CaseResult) -> Iterator[Contradiction]:
    # Built-in systems record alike on all ranks; a user's system need not.
    compared, places = result.compared, result.steps * result.world_size
    if result.case.parallelism.pp > 1:  # stages have different parameters
        places = result.steps
    for kind in ("grad", "param", "optimizer"):
        if compared[kind] % places:
            yield Contradiction(f"compared.{kind}", f"as many on each of {places} ranks and steps", compared[kind])
    if compared["grad"] != compared["param"]:
        yield Contradiction("compared.grad", f"{compared['param']}, one a parameter", compared["grad"])
    if compared["optimizer"] % compared["param"]:
        yield Contradiction("compared.optimizer", "as many for each parameter", compared["optimizer"])


def _misplaced(result: CaseResult) -> Iterator[Contradiction]:
    first = result.first_divergence
    if first is None:
        return
    if not (first.step in result.case.compared_steps and 0 <= first.rank < result.world_size):
        place = f"step {first.step}, rank {first.rank}"
        yield Contradiction("first_divergence", "a step and a rank of the case", place)
    if not first.between and any(result.compared.values()) and not result.mismatched.get(first.kind):
        yield Contradiction("first_divergence.kind", "a kind of records that differ", first.kind)
    # Every line of a report that states how many elements differ: the tensor, the call's output, each
    # call of the chain.
    output, chain = (first.call.output, first.call.chain) if first.call else (None, None)
    lines: list[TensorDifference | ChainLink] = [first.tensor, *([output] if output else []), *(chain or [])]
    for found in lines:
        if found.elements is not None and not 0 <= (found.elements_differing or 0) <= found.elements:
            yield Contradiction(
                "first_divergence.elements_differing", f"0 to {found.elements}", found.elements_differing
            )
    # A weaker status than the numbers support is possible: a report may withhold a claim, but not exaggerate it.
    if first.call and (made := first.call.verification):
        strongest = Verification.strongest(made.differing, made.remaining, made.reverse)
        known = get_args(VerificationStatus)
        if known.index(made.status) > known.index(strongest):
            yield Contradiction("first_divergence.verification.status", f"{strongest}, by its numbers", made.status)


def _unfounded_equal(result: CaseResult) -> Iterator[Contradiction]:
    if any(result.mismatched.values()) or result.differing_kinds or result.first_divergence is not None:
        yield _not_supported(result, "as records differ")
    if result.losses["reference"] != result.losses["candidate"]:
        yield _not_supported(result, "as losses differ")
    if result.error is not None:
        yield _not_supported(result, "as there is an error")


def _unfounded_close(result: CaseResult) -> Iterator[Contradiction]:
    # Only the first reason: each check presumes those before it.
    bound, closeness = result.case.close_within, result.closeness
    if result.layouts is not None:
        yield from _unfounded_layouts(result, result.layouts)
    elif bound is None:
        yield _not_supported(result, "as the case states no bound")
    elif closeness is None or closeness.bound != bound or not closeness.is_within:
        yield _not_supported(result, f"as no evidence shows every tensor within {bound:g}")
    elif not any(result.mismatched.values()):
        yield _not_supported(result, "as no record differs")
    elif result.error is not None:
        yield _not_supported(result, "as there is an error")
    else:
        yield from _unfounded_closeness(result)


def _unfounded_layouts(result: CaseResult, found: LayoutBounds) -> Iterator[Contradiction]:
    # Every row is a tensor that may differ, so there cannot be more rows than such tensors.
    # CLOSE of two layouts needs a difference, and every tensor within its measured bound.
    if not found.is_rounding or not found.rows or len(found.rows) > found.regrouped:
        yield _not_supported(result, "as no evidence shows every tensor within what sums in other orders explain")
    elif max(row.rank for row in found.rows) >= result.case.parallelism.world_size:
        yield _not_supported(result, "as a bound is of a rank that the case does not have")
    elif not any(result.mismatched.values()):
        yield _not_supported(result, "as no record differs")
    elif result.error is not None:
        yield _not_supported(result, "as there is an error")


def _unfounded_different(result: CaseResult) -> Iterator[Contradiction]:
    if not any(result.mismatched.values()):
        yield _not_supported(result, "as no record differs")
    for kind in result.differing_kinds:
        if not result.mismatched.get(kind):
            yield Contradiction("differing_kinds", "kinds of records that differ", kind)
    if result.closeness is not None and result.case.differs_within is not None and not result.is_beyond_bound:
        yield from _unfounded_closeness(result)


def _unfounded_closeness(result: CaseResult) -> Iterator[Contradiction]:
    found = result.closeness
    assert found is not None
    # Every compared kind must be measured, and no tensor or element may be beyond the bound.
    if {kind for kind, count in result.compared.items() if count} != found.histogram.keys():
        yield _not_supported(result, "as the histogram lacks a compared kind")
    if any(UNLIKE in buckets for buckets in found.histogram.values()):
        yield _not_supported(result, "as elements are unlike")
    if found.first_beyond is not None:
        yield Contradiction("closeness.first_beyond", "none, as no tensor is beyond the bound", found.first_beyond.name)


def _miscounted(result: CaseResult) -> Iterator[Contradiction]:
    places = [
        (kind, int(step), rank)
        for kind, names in result.differing.items()
        for steps in names.values()
        for step, ranks in steps.items()
        for rank in ranks
    ]
    # The listed keys, with those left out, must be as many as the differing records.
    expected = sum(result.mismatched.values())
    if len(places) + result.differing_left_out != expected:
        yield Contradiction("differing", f"{expected} keys, by the mismatched records", len(places))
    # Kinds without a key are listed with 0, so that an unknown kind cannot hide behind an empty table.
    listed = dict.fromkeys(result.differing, 0) | Counter(kind for kind, _, _ in places)
    for kind, count in listed.items():
        if count > result.mismatched.get(kind, 0):
            yield Contradiction(f"differing.{kind}", f"{result.mismatched.get(kind, 0)} keys at most", count)
    for kind, step, rank in places:
        if step not in result.case.compared_steps or rank >= result.world_size:
            yield Contradiction(f"differing.{kind}", "steps and ranks of the case", f"step {step}, rank {rank}")
