"""Regrouped sums: the same summands in another grouping, such as a + (b + c) for (a + b) + c, have other bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.packing import name_of
from bitproof.harness.localize.logs.reference_log import COMMUTATIVE


def regrouped(log: CandidateLog, call: Call) -> Call | None:
    """The first sum of the reference that the candidate's `log` lacks because it groups the same summands differently.

    `call` is a call of the log that adds some of these summands. Example: the reference computes (a + b) + c, the log
    a + (b + c), and `call` is its b + c, which corresponds to no call of the reference. The answer is the reference's
    call that adds c. None if there is no such sum.
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
    """The summands of each sum, with sums of sums resolved: {a + b: {a, b}, (a + b) + c: {a, b, c}}.

    A sum is a call with the operator and the numbers of `wanted`; the operator may also be, for example, `mul`.
    """
    found: dict[str, Counter[str]] = {}
    for call in calls:
        if (call.operator, call.scalars) == (wanted.operator, wanted.scalars):
            parts = (found.get(value, Counter([value])) for value in call.inputs)
            found |= dict.fromkeys(call.outputs, sum(parts, Counter[str]()))
    return found
