"""Regrouped sums: the same summands in another grouping, such as a + (b + c) for (a + b) + c, have other bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.packing import name_of
from bitproof.harness.localize.logs.reference_log import COMMUTATIVE


def regrouped(log: CandidateLog, call: Call) -> Call | None:
    """The first sum of the reference that a log lacks although it adds the same summands in another grouping.

    `call` is a partial sum of the log. For example, b + c, where the log has a + (b + c): the answer is the
    reference's (a + b) + c, since b + c alone corresponds to no call of the reference. None if there is no such sum.
    """
    if name_of(call) not in COMMUTATIVE or len(call.inputs) < 2:
        return None
    mine, part = _summands(log.log, call), Counter[str]()
    for value in call.inputs:
        part += mine.get(value, Counter([value]))
    for value, summands in _summands(log.reference.log, call).items():
        if not log.has([value]) and part <= summands and summands in mine.values():
            index = log.reference.producer(value)
            return None if index is None else log.reference.log[index]
    return None


def _summands(calls: Sequence[Call], wanted: Call) -> dict[str, Counter[str]]:
    """The summands of each sum, through sums of sums: {a + b: {a, b}, (a + b) + c: {a, b, c}}.

    It counts calls of the operator of `wanted` with the same numbers; that may be another commutative operator.
    """
    found: dict[str, Counter[str]] = {}
    for call in calls:
        if (call.operator, call.scalars) == (wanted.operator, wanted.scalars):
            parts = (found.get(value, Counter([value])) for value in call.inputs)
            found |= dict.fromkeys(call.outputs, sum(parts, Counter[str]()))
    return found
