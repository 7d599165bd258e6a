"""Cases with two layouts: second runs record cells, and, if bits differ, further runs reorder sums.

1. The first runs of both systems determine the cuts: the indices at which either layout divides a tensor. Cells are the
   parts between cuts, so each rank of either layout has all of a cell or nothing of it. Each system runs again as its
   control, and records the digests of cells.
2. The reference, converted to the candidate's layout, is compared with the candidate as usual.
3. If bits differ in a tensor whose sums are ordered differently, the reference runs three more times with reordered
   sums. The values of all these runs give bounds, and the candidate is compared with them.
4. If all tensors are within their bounds, a defect as small as rounding may still be hidden. So both systems, and the
   reference with reordered sums, run once more in float64 (`disturb.widen`): rounding is 2^29 times smaller there than
   in float32, and a defect is not.
5. If a system cannot run in float64, and some tensors differ by more than rounding usually does, the reference runs up
   to twelve times: more runs narrow the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitproof.harness.case import Case
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
from bitproof.harness.disturb.regroup import Across, Recorded, Regroup
from bitproof.harness.errors import BitproofError
from bitproof.harness.execute.requests import BoundsRequest, Float64Request
from bitproof.harness.options import ROLES, Role
from bitproof.harness.powers.two_layouts.phases import PHASES, apart_from, is_exact, regrouped_between
from bitproof.harness.records import Comparison, InFloat64, LayoutBounds, Recording, Verdict
from bitproof.harness.records.layout_bounds import FEWEST_SAMPLES, MOST_SAMPLES

CELLS = "cells"

FLOAT64 = "float64"


Record = Callable[[Role, str, Across], Recorded]
"""Runs a side once and returns its recording. The text names the run, such as `cells`, among the side's runs."""


@dataclass(frozen=True, kw_only=True)
class AcrossLayouts:
    """The comparison of both sides' second runs, the comparison of each side with itself (control), and the bounds.

    `have_partners`: each call of a rank has a counterpart on the other side, so that the call to blame can be found.
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
    ask: Callable[[Any], Any],
) -> AcrossLayouts:
    """Compare two systems that lay tensors out differently.

    `firsts` are the recordings of their first runs. `record` runs a side again, `read` reads a recording from its
    folder, and `ask` sends the host a request and returns the answer.
    """
    cuts = common_cuts(firsts["reference"], firsts["candidate"])
    folders = {role: record(role, CELLS, Across(cuts=cuts, keeps_values=True)).folder for role in ROLES}
    cells = {role: read(folder) for role, folder in folders.items()}
    controls = {role: compare(firsts[role], cells[role], case.of(role)) for role in ROLES}
    # A candidate that resumes from the reference has no record of the steps before.
    cells["reference"] = cells["reference"].from_step(case.first_step)
    other = relaid(cells["reference"], cells["candidate"], cuts)
    comparison = _with_layouts(compare(other.recording, cells["candidate"], case), other, cells)
    layouts = _exactness(cells, other)
    # Reordered sums explain a difference only if both systems repeat themselves, and the sums are not the same.
    are_repeated = all(control.verdict == Verdict.EQUAL for control in controls.values())
    may_be_close = comparison.verdict == Verdict.DIFFERENT and layouts.regrouped and not comparison.layout_mismatches
    if may_be_close and are_repeated:
        # At least two parts: a sum in a single part has no other order.
        parts, start = max(2, case.most_ranks), apart_from(firsts["candidate"].manifest)
        apart = [(tensor.step, tensor.kind, tensor.name) for tensor in sorted(other.parted | _one_sided(cells))]

        def sample(seed: int, *, in_float64: bool = False) -> Recorded:
            regroup = Regroup(seed=seed, parts=parts, first_step=start)
            across = Across(cuts={}, keeps_values=True, regroup=regroup, in_float64=in_float64)
            return record("reference", f"{FLOAT64 if in_float64 else ''}regrouped{seed}", across)

        # The bounds are computed in the host, which has torch: this process only passes folders.
        samples = [sample(seed).folder for seed in range(1, FEWEST_SAMPLES + 1)]
        plain = BoundsRequest(**folders, samples=samples, apart=apart)
        layouts = ask(plain)
        if layouts.is_within:
            layouts = replace(layouts, in_float64=_in_float64(plain, record, sample, ask))
            if layouts.in_float64.failed and layouts.near:
                more = [sample(seed).folder for seed in range(FEWEST_SAMPLES + 1, MOST_SAMPLES + 1)]
                narrower = ask(replace(plain, samples=samples + more))
                layouts = replace(narrower, in_float64=layouts.in_float64)
    have_partners = lack_parts_alone(case, firsts["reference"], firsts["candidate"])
    return AcrossLayouts(comparison=comparison, controls=controls, layouts=layouts, have_partners=have_partners)


def _in_float64(plain: BoundsRequest, record: Record, sample: Callable[..., Recorded], ask: Any) -> InFloat64:
    """Compare the layouts in float64. If a system cannot run in float64, `failed` of the result is the reason."""
    across = Across(cuts={}, keeps_values=True, in_float64=True)
    try:
        sides = {role: record(role, FLOAT64, across) for role in ROLES}
        other = sample(1, in_float64=True)
    except BitproofError as error:
        return InFloat64(failed="; ".join(filter(None, (error.what, error.found))))
    folders = {role: side.folder for role, side in sides.items()}
    found = ask(Float64Request(**folders, samples=[other.folder], plain=plain))
    narrow = next((side.narrow for side in (*sides.values(), other) if side.narrow), None)
    return replace(found, narrow=narrow)


def _one_sided(cells: Mapping[Role, Recording]) -> set[LogicalTensor]:
    """The logical tensors whose replicas differ within a single side, and agree within the other side.

    Example: a gradient that is recorded before its all-reduce in the candidate, and after it in the reference.
    """
    here, there = (set(replicas(cells[role])) for role in ROLES)
    return here ^ there


def _with_layouts(comparison: Comparison, other: Relaid, cells: Mapping[Role, Recording]) -> Comparison:
    """The comparison with remarks about replicas that differ; UNVERIFIED if the layout of some tensor is not known."""
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
    """Count the tensors that must be equal bit by bit, and those that may differ by rounding. Bounds are not set yet.

    A tensor must be equal if it is computed before the first phase in which the two systems add in different orders.
    """
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
