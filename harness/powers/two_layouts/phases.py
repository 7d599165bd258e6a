"""Decides which tensors must be equal bit by bit between two systems with different layouts.

A layout changes only the order of sums. A step has the phases forward, backward, clipping and update. In some phase,
the two systems sum or exchange among different ranks for the first time; tensors of earlier phases must be equal. Two
sums have the same order under these rules:

- Two terms have the same sum in either order. Over two ranks, an all-reduce and a reduce-scatter agree. Over more
  ranks, different collectives add in different orders.
- Several backward passes per step change the order: one system may reduce accumulated gradients, another may accumulate
  reduced gradients. If their number differs, the systems divide the batch differently, and all sums differ.
- Over more than two ranks, the order for an element depends on its index among all elements that are added at once
  (measured on gloo's ring). So sums of other sizes, or of gradients that are divided differently, differ. Example:
  FSDP1 cuts a flattened tensor, and FSDP2 cuts rows.
- Scaling by a number that is not a power of two rounds: dividing each term by 3 differs from dividing the sum by 3.

Pipeline stages are an exception: if each parameter is on a single rank, and no collective sums over ranks, the number
of ranks has no effect. Then both systems must add the same number of parts to each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from bitproof.harness.case import boundary_of
from bitproof.harness.compare.order import BEFORE_FORWARD
from bitproof.harness.compare.part_layouts import LogicalTensor
from bitproof.harness.powers.two_layouts.reshard import are_gradients_divided_differently, are_staged
from bitproof.harness.records import Manifest, Meeting, Recording
from bitproof.harness.records.layout_bounds import Phase

PHASES: tuple[Phase, ...] = get_args(Phase)


def regrouped_from(
    reference: Manifest, candidate: Manifest, *, are_staged: bool = False, are_moved: bool = False
) -> int | None:
    """Return the phase, as an index into PHASES, from which the two systems' sums differ in order or terms; None if
    none differ.

    - `are_staged`: each parameter is on a single rank.
    - `are_moved`: the two systems divide gradients differently.
    """
    meetings = [manifest.meetings or () for manifest in (reference, candidate)]
    if are_staged and not any(meeting.ranks for side in meetings for meeting in side):
        return None if _have_equal_parts(*meetings) else 0
    # Another number of ranks divides the batch differently, so sums differ from the first phase on.
    if reference.world_size != candidate.world_size:
        return 0
    for place, phase in enumerate(PHASES):
        # "parts" counts what each gradient is added from, which matters for stages alone.
        met = [[meeting for meeting in side if meeting.phase == phase and meeting.what != "parts"] for side in meetings]
        sides = [{_signature(meeting) for meeting in side} for side in met]
        if sides[0] != sides[1] or (
            are_moved and any(_depends_on_division(meeting) for side in met for meeting in side)
        ):
            return place
    return None


def regrouped_between(reference: Recording, candidate: Recording) -> int | None:
    """Return the phase, as an index into PHASES, from which two recordings' sums differ in order or terms; None if none
    differ.
    """
    sides = reference, candidate
    manifests = (side.manifest for side in sides)
    return regrouped_from(
        *manifests, are_staged=are_staged(*sides), are_moved=are_gradients_divided_differently(*sides)
    )


def first_step_of_own_layout(candidate: Manifest) -> int:
    """Return the first step that the candidate runs with its own layout.

    This is 0, unless the candidate starts from a checkpoint of the reference: then it is the step at which it resumes.
    """
    return int(candidate.case["resume_at"]) if candidate.case.get("resumes_reference") else 0


def _have_equal_parts(*sides: Sequence[Meeting]) -> bool:
    """Whether both systems add the same number of parts to each gradient.

    If every gradient has only one part, the systems' numbers of backward passes must be equal, too.
    """
    parts, backwards = (
        [{meeting.backwards for meeting in side if meeting.what == what} for side in sides]
        for what in ("parts", "backward")
    )
    return parts[0] == parts[1] and (max(parts[0], default=1) > 1 or backwards[0] == backwards[1])


def _signature(meeting: Meeting) -> tuple[str, str, str, int]:
    """Return a key that is equal for collectives that add in the same order. Over two ranks, all collectives do."""
    if meeting.what == "backward":
        return meeting.what, "", str(meeting.backwards), 0
    # Ranks such as "0,1,2": two terms have only one sum, whichever collective adds them. A scaling's operator has its
    # factor.
    is_ordered = meeting.ranks.count(",") > 1 or meeting.backwards > 1 or meeting.what == "scale"
    return meeting.what, meeting.ranks, meeting.operator if is_ordered else "", meeting.elements


def _depends_on_division(meeting: Meeting) -> bool:
    """Whether a sum may change if gradients are divided differently among ranks.

    - A sum over more than two ranks may get another order.
    - A functional all-reduce may get other terms: it adds results of a DTensor's parts, such as norms.
    """
    if meeting.phase == "forward" or meeting.what != "sum":
        return False
    # `elements` is 0 for sums over two ranks, and 1 for single numbers, which no layout divides.
    return meeting.elements > 1 or (meeting.phase != "backward" and meeting.operator.startswith("all_reduce"))


def phase_of(tensor: LogicalTensor) -> int:
    """Return the phase that computes a tensor, as an index into PHASES; -1 if the tensor existed before the step."""
    if tensor.kind == "buffer" and tensor.name.endswith(BEFORE_FORWARD):
        return -1
    if tensor.kind == "activation":
        boundary = boundary_of(tensor.name)
        return 0 if boundary and boundary.direction == "forward" else 1
    if tensor.kind == "loss" or (tensor.kind == "buffer" and tensor.name.endswith("@before_optimizer")):
        return 0
    # Gradients are recorded after clipping; parameters and the optimizer's state after the update.
    return 2 if tensor.kind in ("grad", "grad_norm") else 3


def is_exact(tensor: LogicalTensor, first: int | None, start: int = 0) -> bool:
    """Whether a tensor must agree in every bit between the systems.

    The systems' sums have different orders from phase `first` (an index into PHASES) of step `start` on. If `first` is
    None, their orders never differ.
    """
    return first is None or tensor.step < start or (tensor.step == start and phase_of(tensor) < first)
