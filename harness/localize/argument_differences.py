"""Describe the differences between a blamed call and its partner, the reference's call that it should equal."""

from __future__ import annotations

from collections import Counter

from bitproof.harness.errors import cut
from bitproof.harness.localize.logs.calls import Call, producer_of
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.packing import OVER_LISTS, name_of
from bitproof.harness.localize.logs.reference_log import ReferenceLog

GIVEN = "an input of the step"


def argument_differences(call: Call, partner: Call) -> str:
    """Return a text about the arguments in which two calls of the same operator differ.

    For example, "eps=1e-05 where the reference has 1e-06". Only numbers, strings and dtypes are compared. Returns "" if
    none differ.
    """
    theirs = dict(partner.scalars)
    unlike = [(name, value, theirs[name]) for name, value in call.scalars if theirs.get(name, value) != value]
    text = ", ".join(f"{name}={mine} where the reference has {other}" for name, mine, other in unlike)
    return cut(text, 300)


def input_differences(log: CandidateLog, index: int, partner: int) -> str:
    """Return a text about the last input in which two calls differ: its source in each system.

    Example: "the output of silu ..., where the reference has the output of mm ...". Returns "" if no input differs.
    """
    sources = input_sources(log, index, partner)
    if sources is None:
        return ""
    if sources[0] != sources[1]:
        return cut(f"{sources[0]}, where the reference has {sources[1]}", 300)
    return "" if sources[0] == GIVEN else cut(f"{sources[0]}, with another value", 300)


def input_sources(log: CandidateLog, index: int, partner: int) -> tuple[str, str] | None:
    """Return two texts about the last differing input of two calls: its source in each system, the candidate's first.

    Example: "the output of mm ..." and "an input of the step". None for equal inputs or unrelated calls.
    """
    # The partner need not match: it may be the call that an extra call replaces. Then a common input is required, since
    # otherwise all inputs differ and none of them says anything.
    if set(log.log[index].inputs).isdisjoint(log.reference.log[partner].inputs) and log.matching_call(index) != partner:
        return None
    sides: tuple[tuple[CandidateLog | ReferenceLog, int], ...] = (log, index), (log.reference, partner)
    inputs = [side.log[at].inputs for side, at in sides]
    lines: list[str] = []
    # A differing value may only have moved to another position. Prefer a position at which the other
    # side has another value.
    for (side, at), mine, other in zip(sides, inputs, reversed(inputs), strict=True):
        # As a multiset: a value that the call reads twice, and its partner once, differs too.
        odd = Counter(mine) - Counter(other)
        positions = [i for i, value in enumerate(mine) if value in odd]
        elsewhere = [i for i in positions if other[i : i + 1] != (mine[i],)]
        if not positions:
            return None
        lines.append(_source_of(side, at, (elsewhere or positions)[-1]))
    return lines[0], lines[1]


def _source_of(side: CandidateLog | ReferenceLog, index: int, position: int) -> str:
    """Return the call that produced an input, as text; "an input of the step" if no call of the step did.

    Views are followed back. A copy's source is added: "the output of clone ..., a copy of the output of mm ...".
    """
    made = producer_of(side.log, side.input_producers, index, position)
    if made is None:
        return GIVEN
    call = side.log[made]
    # A call whose outputs are among its inputs is a copy. Not so a collective: its equal output may
    # be another rank's value.
    if call.collective or not call.outputs or not set(call.outputs) <= set(call.inputs):
        return f"the output of {call}"
    copied = _source_of(side, made, call.inputs.index(call.outputs[0]))
    return f"the output of {call}" if copied == GIVEN else f"the output of {call}, a copy of {copied}"


def list_differences(log: CandidateLog, missing: Call) -> str:
    """Return a text for a missing call of a list operator: how many tensors the candidate's lists have.

    For example, "3 of the reference's 4 tensors in its lists" for `_foreach_add_`. Returns "" if they have none or all
    of the tensors, and for other operators.
    """
    if not name_of(missing).startswith(OVER_LISTS):
        return ""
    # Such a call is logged as a call for each tensor of its lists, so the numbers of logged calls are the lengths.
    made, due = (
        sum((call.operator, call.place) == (missing.operator, missing.place) for call in calls)
        for calls in (log.log, log.reference.log)
    )
    return f"{made} of the reference's {due} tensors in its lists" if 0 < made < due else ""


def strange_output(log: CandidateLog, call: Call) -> str:
    """Return the first output of the compiled graph `call` that the reference never computed, as text.

    Example: "output 1 of 3, mm_2 of layers.0 (forward)". Returns "" if the reference computed all outputs, or if the
    call that computes the output is unknown.
    """
    values = log.reference.values
    position = next((str(at) for at, value in enumerate(call.outputs) if value not in values), None)
    # The entry of a compiled graph has, for each output, the position as the name and the computing call as the value.
    made_by = dict(call.scalars).get(str(position))
    return "" if made_by is None else f"output {position} of {len(call.scalars)}, {made_by}"
