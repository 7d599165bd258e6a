"""Which tensors another layout must leave as they are in every bit.

A layout changes nothing but the order of sums. Up to the first phase of a step (forward, backward, what is done to
gradients before they are shown, update) in which the two systems add over other ranks, or exchange rows among other
ones, every sum has the same terms in the same order: each tensor up to there must agree in every bit. Two terms have
one sum, so over two ranks an all-reduce and a reduce-scatter agree; over more, other collectives add in other orders,
and so they do where several backwards of a step add: one reduces what was accumulated, another accumulates what was
reduced. Where a step has another number of backwards, its batch is added in other parts from the first on.

Stages of a pipeline are no such layout: where each parameter lies on one rank alone, on both sides, and no rank adds
over others, all terms of a gradient are added where it lies. On however many ranks, the sums are the same if gradients
are added of as many parts in place, or of one in as many backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from bitproof.harness.case import boundary_of
from bitproof.harness.compare.order import BEFORE_FORWARD
from bitproof.harness.compare.relaid import LogicalTensor
from bitproof.harness.records import Manifest, Meeting
from bitproof.harness.records.layout_bounds import Phase

PHASES: tuple[Phase, ...] = get_args(Phase)


def regrouped_from(reference: Manifest, candidate: Manifest, *, are_staged: bool = False) -> int | None:
    """The first phase, as its place in PHASES, whose sums have another order or other terms; None where none has.

    Systems of unequal numbers of ranks cut the batch otherwise, so from the first on. With `are_staged` each parameter
    lies on one rank alone.
    """
    meetings = [manifest.meetings or () for manifest in (reference, candidate)]
    if are_staged and not any(meeting.ranks for side in meetings for meeting in side):
        return None if _are_added_alike(*meetings) else 0
    if reference.world_size != candidate.world_size:
        return 0
    for place, phase in enumerate(PHASES):
        sides = [
            {_signature(meeting) for meeting in side if meeting.phase == phase and meeting.what != "parts"}
            for side in meetings
        ]
        if sides[0] != sides[1]:
            return place
    return None


def apart_from(candidate: Manifest) -> int:
    """The first step in which the candidate may lie otherwise on the ranks: before, what it goes on from was taken."""
    return int(candidate.case["resume_at"]) if candidate.case.get("resumes_reference") else 0


def _are_added_alike(*sides: Sequence[Meeting]) -> bool:
    """Whether both add gradients of as many parts, seen as such, or else in as many backwards."""
    parts, backwards = (
        [{meeting.backwards for meeting in side if meeting.what == what} for side in sides]
        for what in ("parts", "backward")
    )
    return parts[0] == parts[1] and (max(parts[0], default=1) > 1 or backwards[0] == backwards[1])


def _signature(meeting: Meeting) -> tuple[str, str, str]:
    """What two sums must have in common to have one order: over two ranks it is the same by any collective."""
    if meeting.what == "backward":
        return meeting.what, "", str(meeting.backwards)
    is_ordered = meeting.ranks.count(",") > 1 or meeting.backwards > 1
    return meeting.what, meeting.ranks, meeting.operator if is_ordered else ""


def phase_of(tensor: LogicalTensor) -> int:
    """In which phase of its step a tensor is computed, as a place in PHASES; before all where a step begins with it."""
    if tensor.kind == "buffer" and tensor.name.endswith(BEFORE_FORWARD):
        return -1
    if tensor.kind == "activation":
        boundary = boundary_of(tensor.name)
        return 0 if boundary and boundary.direction == "forward" else 1
    if tensor.kind == "loss" or (tensor.kind == "buffer" and tensor.name.endswith("@before_optimizer")):
        return 0
    return 2 if tensor.kind in ("grad", "grad_norm") else 3


def is_exact(tensor: LogicalTensor, first: int | None, start: int = 0) -> bool:
    """Whether a tensor must agree in every bit, where sums have another order from a phase of step `start` on."""
    return first is None or tensor.step < start or (tensor.step == start and phase_of(tensor) < first)
