"""The calls around the culprit, and the agreement of all calls of its rank with the other side, by module."""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.reference_log import ReferenceLog
from bitproof.harness.records import ModuleCalls, Neighbour

NUM_NEIGHBOURS = 3


def neighbours_of(
    culprit: Culprit, reference: Sequence[Sequence[Call]], candidate: Sequence[Sequence[Call]]
) -> list[Neighbour]:
    """The culprit with up to NUM_NEIGHBOURS calls before and after it on its rank, in execution order.

    `agrees`: whether the other side has the call's outputs at the same place. A view that only this side takes agrees
    if its input does. The calls are from the candidate's log or, if that lacks the culprit, from the reference's.
    """
    mine, agrees = _judged(culprit, reference, candidate)
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


def modules_of(
    culprit: Culprit, reference: Sequence[Sequence[Call]], candidate: Sequence[Sequence[Call]]
) -> list[ModuleCalls]:
    """The number of calls and of differing calls of the culprit's rank, by module and direction, in execution order.

    `turn` numbers the modules that differ, from 1, by their first differing call.
    """
    mine, agrees = _judged(culprit, reference, candidate)
    found: dict[tuple[str | None, str | None], list[bool]] = {}
    turns: dict[tuple[str | None, str | None], int] = {}
    for call, is_right in zip(mine, agrees, strict=True):
        found.setdefault(call.place[:2], []).append(is_right)
        if not is_right:
            turns.setdefault(call.place[:2], len(turns) + 1)
    return [
        ModuleCalls(
            module=module,
            direction=direction,
            calls=len(rights),
            differing=rights.count(False),
            turn=turns.get((module, direction)),
        )
        for (module, direction), rights in found.items()
    ]


def _judged(
    culprit: Culprit, reference: Sequence[Sequence[Call]], candidate: Sequence[Sequence[Call]]
) -> tuple[Sequence[Call], list[bool]]:
    """The log that contains the culprit, and for each call whether it agrees with the other side."""
    mine, other = candidate[culprit.rank], reference[culprit.rank]
    if culprit.candidate is None:
        mine, other = other, mine
    return mine, _agreements(mine, ReferenceLog(other))


def _agreements(calls: Sequence[Call], reference: ReferenceLog) -> list[bool]:
    """Whether each call of a log agrees with the other side."""
    # `right` also has the values of the views that only this side takes, since more such views may follow.
    found, right = [], set(reference.values)
    for call in calls:
        is_own_view = call.view and not reference.calls(call)
        found.append(right.issuperset(call.inputs) if is_own_view else reference.knows(call))
        if is_own_view and found[-1]:
            right.update(call.outputs)
    return found
