"""Which tensors another layout must leave as they are in every bit.

A layout changes nothing but the order of sums. Up to the first phase of a step (forward, backward, what is done to
gradients before they are shown, update) in which the two systems add over other ranks, or exchange rows among other
ones, every sum has the same terms in the same order: each tensor up to there must agree in every bit. Two terms have
one sum, so over two ranks an all-reduce and a reduce-scatter agree; over more, other collectives add in other orders,
and so they do where several backwards of a step add: one reduces what was accumulated, another accumulates what was
reduced. Where a step has another number of backwards, its batch is added in other parts from the first on.

Over more than two ranks one collective adds an element in an order that its place among all that are added at once
decides (measured on gloo's ring). So sums of other sizes have other orders, and so have those of gradients where ranks
hold other parts of them: FSDP1 cuts what it flattened where FSDP2 cuts rows. Such parts have other norms, too, and a
norm is summed over any number of ranks. A number that is no power of two rounds: what is divided by 3 before it is
added is no sum that is divided by 3.

Stages of a pipeline are no such layout: where each parameter lies on one rank alone, on both sides, and no rank adds
over others, all terms of a gradient are added where it lies. On however many ranks, the sums are the same if gradients
are added of as many parts in place, or of one in as many backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from bitproof.harness.case import boundary_of
from bitproof.harness.compare.order import BEFORE_FORWARD
from bitproof.harness.compare.relaid import LogicalTensor, are_staged, gradients_lie_otherwise
from bitproof.harness.records import Manifest, Meeting, Recording
from bitproof.harness.records.layout_bounds import Phase

PHASES: tuple[Phase, ...] = get_args(Phase)


def regrouped_from(
    reference: Manifest, candidate: Manifest, *, are_staged: bool = False, are_moved: bool = False
) -> int | None:
    """The first phase, as its place in PHASES, whose sums have another order or other terms; None where none has.

    Systems of unequal numbers of ranks cut the batch otherwise, so from the first on. With `are_staged` each parameter
    lies on one rank alone; with `are_moved` ranks hold other parts of gradients than the other system's.
    """
    meetings = [manifest.meetings or () for manifest in (reference, candidate)]
    if are_staged and not any(meeting.ranks for side in meetings for meeting in side):
        return None if _are_added_alike(*meetings) else 0
    if reference.world_size != candidate.world_size:
        return 0
    for place, phase in enumerate(PHASES):
        met = [[meeting for meeting in side if meeting.phase == phase and meeting.what != "parts"] for side in meetings]
        sides = [{_signature(meeting) for meeting in side} for side in met]
        if sides[0] != sides[1] or (are_moved and any(_follows_places(meeting) for side in met for meeting in side)):
            return place
    return None


def regrouped_between(reference: Recording, candidate: Recording) -> int | None:
    """The same of two recordings."""
    sides = reference, candidate
    manifests = (side.manifest for side in sides)
    return regrouped_from(*manifests, are_staged=are_staged(*sides), are_moved=gradients_lie_otherwise(*sides))


def apart_from(candidate: Manifest) -> int:
    """The first step in which the candidate may have its own layout: earlier steps are those of what it resumes."""
    return int(candidate.case["resume_at"]) if candidate.case.get("resumes_reference") else 0


def _are_added_alike(*sides: Sequence[Meeting]) -> bool:
    """Whether both add gradients of as many parts, seen as such, or else in as many backwards."""
    parts, backwards = (
        [{meeting.backwards for meeting in side if meeting.what == what} for side in sides]
        for what in ("parts", "backward")
    )
    return parts[0] == parts[1] and (max(parts[0], default=1) > 1 or backwards[0] == backwards[1])


def _signature(meeting: Meeting) -> tuple[str, str, str, int]:
    """What two sums must have in common to have one order: over two ranks it is the same by any collective."""
    if meeting.what == "backward":
        return meeting.what, "", str(meeting.backwards), 0
    is_ordered = meeting.ranks.count(",") > 1 or meeting.backwards > 1 or meeting.what == "scale"
    return meeting.what, meeting.ranks, meeting.operator if is_ordered else "", meeting.elements


def _follows_places(meeting: Meeting) -> bool:
    """Whether a sum's order or terms follow from which parts of gradients ranks hold.

    What its ranks computed of their parts, such as a norm, a DTensor adds by a functional all-reduce.
    """
    if meeting.phase == "forward" or meeting.what != "sum":
        return False
    return meeting.elements > 1 or (meeting.phase != "backward" and meeting.operator.startswith("all_reduce"))


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
