"""Compares two systems that divide tensors among ranks differently, such as FSDP on 2 ranks with a single rank.

1. Run both systems. Cut each tensor into cells, wherever either system cuts it. Example: rows 0-2, 2-4 and rows 0-3,
   3-4 have the cells 0-2, 2-3, 3-4.
2. Run both systems again, and record a digest of each cell. Each run must equal the system's first run.
3. Convert the reference's records to the candidate's layout, and compare them as usual.
4. If a tensor differs and its sums have different orders in the two systems, run the reference three more times with
   sums in other orders. These runs give a bound for each tensor.
5. A defect as small as rounding may hide within the bounds, so run both systems in float64 (`widen`). There, rounding
   is 2^29 times smaller than in float32, but a defect stays as large.
6. If a system cannot run in float64, and tensors differ by more than rounding usually does, up to twelve orders of sums
   narrow the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bitproof.harness.case import Case
from bitproof.harness.compare.part_layouts import LogicalTensor
from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import BitproofError, RankError
from bitproof.harness.execute.requests import CallRequest
from bitproof.harness.options import ROLES, Role
from bitproof.harness.powers.two_layouts.phases import PHASES, first_step_of_own_layout, is_exact, regrouped_between
from bitproof.harness.powers.two_layouts.reshard import (
    Resharded,
    common_cuts,
    differ_only_by_missing_parts,
    first_few,
    replicas,
    resharded,
    tensors_of,
)
from bitproof.harness.records import Comparison, InFloat64, LayoutBounds, Recording, Verdict
from bitproof.harness.records.layout import Across, Recorded, Regroup
from bitproof.harness.records.layout_bounds import FEWEST_SAMPLES, MOST_SAMPLES
from bitproof.harness.validate import read as read_checked

CELLS = "cells"

FLOAT64 = "float64"

MEASURES = "bitproof.harness.powers.two_layouts.regrouping"

T = TypeVar("T")

Record = Callable[[Role, str, Across], Recorded]
"""Runs a role's system once, and returns its recording.

The arguments are the role, the run's name, such as `cells`, and the settings of the run.
"""


@dataclass(frozen=True, kw_only=True)
class AcrossLayouts:
    """The results for a case whose systems divide tensors differently.

    - `comparison`: the comparison of both systems' second runs, in the candidate's layout.
    - `controls`: the comparison of each system's second run with its first.
    - `layouts`: which tensors must be equal, and bounds for the others.
    - `have_partners`: whether operator calls can be paired between the systems, so that the first wrong call can be
      found.
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
    """Compare two systems that divide tensors among ranks differently.

    - `firsts`: recording of each system's first run.
    - `record`: runs a system again.
    - `read`: reads a recording from its folder.
    - `ask`: sends a request to the process with torch, and returns the answer.
    """
    cuts = common_cuts(firsts["reference"], firsts["candidate"])
    # The second run of each system: its control, with a digest per cell.
    folders = {role: record(role, CELLS, Across(cuts=cuts, keeps_values=True)).folder for role in ROLES}
    cells = {role: read(folder) for role, folder in folders.items()}
    controls = {role: compare(firsts[role], cells[role], case.of(role)) for role in ROLES}
    # A candidate that resumes from the reference has no record of the steps before.
    cells["reference"] = cells["reference"].from_step(case.first_step)
    other = resharded(cells["reference"], cells["candidate"], cuts)
    comparison = _with_layout_remarks(compare(other.recording, cells["candidate"], case), other, cells)
    layouts = _exactness(cells, other)
    # Reordered sums explain a difference only if both systems repeat themselves, and the sums are not the same.
    are_repeated = all(control.verdict == Verdict.EQUAL for control in controls.values())
    may_be_close = comparison.verdict == Verdict.DIFFERENT and layouts.regrouped and not comparison.layout_mismatches
    if may_be_close and are_repeated:
        # At least two parts: a sum in a single part has no other order.
        parts, start = max(2, case.most_ranks), first_step_of_own_layout(firsts["candidate"].manifest)
        apart = [
            (tensor.step, tensor.kind, tensor.name) for tensor in sorted(other.unequal_replicas | _one_sided(cells))
        ]

        def sample(seed: int, *, in_float64: bool = False) -> Recorded:
            regroup = Regroup(seed=seed, parts=parts, first_step=start)
            across = Across(cuts={}, keeps_values=True, regroup=regroup, in_float64=in_float64)
            return record("reference", f"{FLOAT64 if in_float64 else ''}regrouped{seed}", across)

        # Values are compared in a process that has torch: this one only passes folders.
        def measure(function: str, kind: type[T], **values: Any) -> T:
            request = CallRequest(case=case, function=f"{MEASURES}:{function}", values=values)
            return read_checked(kind, ask(request).values, function, RankError)

        samples = [sample(seed).folder for seed in range(1, FEWEST_SAMPLES + 1)]
        plain = {str(role): folder for role, folder in folders.items()} | {"samples": samples, "apart": apart}
        layouts = measure("layouts_of", LayoutBounds, **plain)
        if layouts.is_within:
            in_float64 = _compare_in_float64(plain, record, sample, measure)
            layouts = replace(layouts, in_float64=in_float64)
            if in_float64.failed and layouts.near:
                # Without float64, only narrower bounds can separate rounding from a small defect.
                more = [sample(seed).folder for seed in range(FEWEST_SAMPLES + 1, MOST_SAMPLES + 1)]
                narrower = measure("layouts_of", LayoutBounds, **plain | {"samples": samples + more})
                layouts = replace(narrower, in_float64=in_float64)
    have_partners = differ_only_by_missing_parts(case, firsts["reference"], firsts["candidate"])
    return AcrossLayouts(comparison=comparison, controls=controls, layouts=layouts, have_partners=have_partners)


def _compare_in_float64(
    plain: Mapping[str, Any], record: Record, sample: Callable[..., Recorded], measure: Callable[..., Any]
) -> InFloat64:
    across = Across(cuts={}, keeps_values=True, in_float64=True)
    try:
        sides = {role: record(role, FLOAT64, across) for role in ROLES}
        other = sample(1, in_float64=True)
    # A user's kernel may have no float64 version. The bounds in the case's own precision still count then.
    except BitproofError as error:
        return InFloat64(failed="; ".join(filter(None, (error.what, error.found))))
    wide = {role: side.folder for role, side in sides.items()} | {"samples": [other.folder]}
    found: InFloat64 = measure("in_float64_of", InFloat64, wide=wide, plain=plain)
    narrow = next((side.narrow for side in (*sides.values(), other) if side.narrow), None)
    return replace(found, narrow=narrow)


def _one_sided(cells: Mapping[Role, Recording]) -> set[LogicalTensor]:
    """Return the tensors whose replicas (copies on several ranks) differ in one system but agree in the other.

    Example: a gradient that is recorded before its all-reduce in the candidate, but after it in the reference.
    """
    here, there = (set(replicas(cells[role])) for role in ROLES)
    # In either system alone: replicas that differ in both are no difference between the systems.
    return here ^ there


def _with_layout_remarks(comparison: Comparison, other: Resharded, cells: Mapping[Role, Recording]) -> Comparison:
    """Add remarks about replicas (copies on several ranks) that differ within a system.

    If a tensor's layout is unknown, the verdict becomes UNVERIFIED.
    """
    apart = [
        f"replicas of one tensor differ within the {role}: {first_few(map(str, found))}"
        for role in ROLES
        if (found := [*replicas(cells[role])])
    ]
    remarks = tuple(dict.fromkeys([*other.remarks, *apart]))
    comparison = replace(comparison, remarks=(*comparison.remarks, *remarks))
    if not other.unusable:
        return comparison
    reason = "\n  ".join(filter(None, (comparison.reason, f"layouts are not known: {first_few(other.unusable)}")))
    return replace(comparison, verdict=Verdict.UNVERIFIED, reason=reason)


def _exactness(cells: Mapping[Role, Recording], other: Resharded) -> LayoutBounds:
    """Count the tensors that must be equal bit by bit, and those that may differ by rounding.

    Example: if only sums in backward have other orders, the loss of step 0 must be equal, and gradients may differ.
    """
    first = regrouped_between(cells["reference"], cells["candidate"])
    start = first_step_of_own_layout(cells["candidate"].manifest)
    tensors = tensors_of(cells["reference"])
    exact = sum(is_exact(tensor, first, start) for tensor in tensors)
    return LayoutBounds(
        across=len(other.across),
        exact=exact,
        regrouped=len(tensors) - exact,
        regrouped_from=None if first is None else PHASES[first],
    )
