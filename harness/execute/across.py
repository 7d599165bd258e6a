"""Cases with two layouts: second runs record cells, and, if bits differ, further runs reorder sums.

1. The first runs of both systems determine the cuts. Each system runs again as its control, and records the digests of
   cells.
2. The reference, converted to the candidate's layout, is compared with the candidate as usual.
3. If bits differ in a tensor whose sums are ordered differently, the reference runs three more times with reordered
   sums. The values of all these runs give bounds, and the candidate is compared with them.
4. If all tensors are within their bounds, and some differ by more than rounding usually does, the reference runs up to
   twelve times: more runs narrow the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.compare.phases import PHASES, apart_from, is_exact, regrouped_between
from bitproof.harness.compare.relaid import (
    LogicalTensor,
    Relaid,
    common_cuts,
    first_few,
    lack_parts_alone,
    relaid,
    replicas,
    tensors_of,
)
from bitproof.harness.compare.verdict import compare
from bitproof.harness.disturb.regroup import Across, Regroup
from bitproof.harness.execute.requests import BoundsRequest
from bitproof.harness.options import ROLES, Role
from bitproof.harness.records import Comparison, LayoutBounds, Recording, Verdict
from bitproof.harness.records.layout_bounds import FEWEST_SAMPLES, MOST_SAMPLES

CELLS = "cells"

Record = Callable[[Role, str, Across], Path]
"""Runs a side as a named arm of the case; returns the folder of its recording."""


@dataclass(frozen=True, kw_only=True)
class AcrossLayouts:
    """The comparison of second runs, each side's control, and the bounds.

    `have_partners`: each call of a rank has a counterpart on the other side, so a cause can be searched for.
    """

    comparison: Comparison
    controls: dict[Role, Comparison]
    layouts: LayoutBounds
    have_partners: bool = False


def compare_layouts(
    case: Case,
    firsts: Mapping[Role, Recording],
    record: Record,
    read: Callable[[Path], Recording],
    ask: Callable[[BoundsRequest], LayoutBounds],
) -> AcrossLayouts:
    """Compare two systems that lay tensors out differently; `firsts` are the recordings of their first runs."""
    cuts = common_cuts(firsts["reference"], firsts["candidate"])
    folders = {role: record(role, CELLS, Across(cuts=cuts, keeps_values=True)) for role in ROLES}
    cells = {role: read(folder) for role, folder in folders.items()}
    controls = {role: compare(firsts[role], cells[role], case.of(role)) for role in ROLES}
    cells["reference"] = cells["reference"].from_step(case.first_step)
    other = relaid(cells["reference"], cells["candidate"], cuts)
    comparison = _with_layouts(compare(other.recording, cells["candidate"], case), other, cells)
    layouts = _exactness(cells, other)
    are_repeated = all(control.verdict == Verdict.EQUAL for control in controls.values())
    may_be_close = comparison.verdict == Verdict.DIFFERENT and layouts.regrouped and not comparison.layout_mismatches
    if may_be_close and are_repeated:
        # At least two parts: a sum in a single part has no other order.
        parts, start = max(2, case.most_ranks), apart_from(firsts["candidate"].manifest)
        apart = [(tensor.step, tensor.kind, tensor.name) for tensor in sorted(other.parted | _one_sided(cells))]
        # Each round adds seeds to the samples of the round before, so no run is repeated.
        samples: list[Path] = []
        for number in (FEWEST_SAMPLES, MOST_SAMPLES):
            for seed in range(len(samples) + 1, number + 1):
                regroup = Regroup(seed=seed, parts=parts, first_step=start)
                samples.append(
                    record("reference", f"regrouped{seed}", Across(cuts={}, keeps_values=True, regroup=regroup))
                )
            layouts = ask(BoundsRequest(**folders, samples=samples, apart=apart))
            if not (layouts.is_within and layouts.near):
                break
    have_partners = lack_parts_alone(case, firsts["reference"], firsts["candidate"])
    return AcrossLayouts(comparison=comparison, controls=controls, layouts=layouts, have_partners=have_partners)


def _one_sided(cells: Mapping[Role, Recording]) -> set[LogicalTensor]:
    """Logical tensors whose replicas differ within one side.

    Example: a gradient that is recorded before its all-reduce in the candidate, and after it in the reference.
    """
    here, there = (set(replicas(cells[role])) for role in ROLES)
    return here ^ there


def _with_layouts(comparison: Comparison, other: Relaid, cells: Mapping[Role, Recording]) -> Comparison:
    """Add to the comparison gaps in the evidence about layouts, and replicas that differ."""
    apart = [
        f"replicas of one tensor differ within the {role}: {first_few(map(str, found))}"
        for role in ROLES
        if (found := [*replicas(cells[role])])
    ]
    remarks = tuple(dict.fromkeys([*other.apart, *apart]))
    comparison = replace(comparison, remarks=(*comparison.remarks, *remarks))
    if not other.unusable:
        return comparison
    reason = "\n  ".join(filter(None, (comparison.reason, f"layouts are not known: {first_few(other.unusable)}")))
    return replace(comparison, verdict=Verdict.UNVERIFIED, reason=reason)


def _exactness(cells: Mapping[Role, Recording], other: Relaid) -> LayoutBounds:
    """Count the tensors that must be equal bit by bit, from the sums that both systems were seen to compute."""
    first = regrouped_between(cells["reference"], cells["candidate"])
    start = apart_from(cells["candidate"].manifest)
    tensors = tensors_of(cells["reference"])
    exact = sum(is_exact(tensor, first, start) for tensor in tensors)
    return LayoutBounds(
        across=len(other.across),
        exact=exact,
        regrouped=len(tensors) - exact,
        regrouped_from=None if first is None else PHASES[first],
    )
