"""Sums of sums: the same summands in another grouping make other partial sums, and other bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.packing import name_of
from bitproof.harness.localize.logs.reference_log import COMMUTATIVE


def regrouped(log: CandidateLog, call: Call) -> Call | None:
    """The first sum of the reference that a log has nowhere, though it adds the same up in another grouping.

    `call` is a part of that. What groups otherwise makes sums that stand for none of the reference's by themselves.
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
    """By sum, its terms, through sums of sums; so for other operators whose order does not count."""
    found: dict[str, Counter[str]] = {}
    for call in calls:
        if (call.operator, call.scalars) == (wanted.operator, wanted.scalars):
            parts = (found.get(value, Counter([value])) for value in call.inputs)
            found |= dict.fromkeys(call.outputs, sum(parts, Counter[str]()))
    return found
