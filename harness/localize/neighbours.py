"""The calls around a blamed one, and which of them agree with the other side."""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.reference_log import ReferenceLog
from bitproof.harness.records import Neighbour

NUM_NEIGHBOURS = 3


def neighbours_of(
    culprit: Culprit, reference: Sequence[Sequence[Call]], candidate: Sequence[Sequence[Call]]
) -> list[Neighbour]:
    """The blamed call, and the calls before and after it on its rank, in execution order.

    `agrees` says of each whether the other side has its outputs where they belong; of a view that the
    other side does not take, whether it is one of a value that agrees. The log is the candidate's; where
    that lacks the call, it is the reference's.
    """
    mine, other = candidate[culprit.rank], reference[culprit.rank]
    if culprit.candidate is None:
        mine, other = other, mine
    agrees = _agreements(mine, ReferenceLog(other))
    return [
        Neighbour(
            operator=call.operator,
            module=call.place.module,
            direction=call.place.direction,
            chunk=call.place.chunk,
            source=call.source,
            agrees=agrees[number],
            is_culprit=number == culprit.index,
        )
        for number, call in list(enumerate(mine))[
            max(0, culprit.index - NUM_NEIGHBOURS) : culprit.index + NUM_NEIGHBOURS + 1
        ]
    ]


def _agreements(calls: Sequence[Call], reference: ReferenceLog) -> list[bool]:
    """Of each call of one log, whether it agrees with the other side."""
    found, right = [], set(reference.values)
    for call in calls:
        is_own_view = call.view and not reference.calls(call)
        found.append(right.issuperset(call.inputs) if is_own_view else reference.knows(call))
        if is_own_view and found[-1]:
            right.update(call.outputs)
    return found
