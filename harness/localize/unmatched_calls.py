"""Calls of an EQUAL candidate whose values the reference never had: what no compared tensor shows may still be wrong.

Passes write calls of their own, such as what packs a bucket, so an unmatched call need be no defect. But a defect that
later rounding swallows, or that inputs hide, is one of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from bitproof.harness.localize.logs.calls import READS_OUT, Call
from bitproof.harness.localize.logs.packing import PACKING

MAX_TOLD = 20


class UnmatchedCall(NamedTuple):
    """A call, as `Call` writes it, and on how many ranks and how often in all it gave what the reference never had."""

    call: str
    ranks: int
    times: int


class Look(NamedTuple):
    """Of one rank's calls in a step, by index: what gave values that the reference never had, and what only packs."""

    strange: list[int]
    packing: list[int]


def told_packing(number: int) -> str:
    """How the summary names calls that only pack, after their number."""
    return f", {number} that only pack right values aside," if number else ""


def listed(found: Sequence[UnmatchedCall]) -> str:
    """The first unmatched calls, and how many more there are."""
    told = [
        f"{unmatched.call} x {unmatched.times}" + (f" on {unmatched.ranks} ranks" if unmatched.ranks > 1 else "")
        for unmatched in found[:MAX_TOLD]
    ]
    return "; ".join([*told, *([f"and {len(found) - MAX_TOLD} more"] if len(found) > MAX_TOLD else [])])


def look_at(reference: Sequence[Call], candidate: Sequence[Call]) -> Look:
    """One rank's logs of one step: each call of the candidate with an output that the reference had nowhere.

    A view, and what only puts right values together, packs: a pass may cut and join as it likes. But not where the
    reference makes that very call, of that operator with those inputs and numbers, with another output.
    """
    right = {value for call in reference for value in (*call.inputs, *call.outputs, *call.aliases)}
    made: defaultdict[tuple[object, ...], set[tuple[str, ...]]] = defaultdict(set)
    for call in reference:
        made[_question(call)].add(call.outputs)
    found = Look([], [])
    for index, call in enumerate(candidate):
        is_read_out = call.operator == READS_OUT and right.issuperset(call.inputs)
        if right.issuperset(call.outputs) or is_read_out:  # eager may read a right number by no operator: `tolist`
            continue
        packs = call.view or call.operator.partition(".")[0] in PACKING
        if packs and right.issuperset(call.inputs) and _question(call) not in made:
            right.update(call.outputs)
            found.packing.append(index)
        else:
            found.strange.append(index)
    return found


def _question(call: Call) -> tuple[object, ...]:
    """All that decides a call's result: calls that agree in it have one result."""
    return call.operator, call.inputs, call.scalars


def summed_up(strange: Sequence[tuple[int, Call]]) -> list[UnmatchedCall]:
    """Unmatched calls with the ranks that have them, one per kind and place, in their own order."""
    times: Counter[str] = Counter()
    ranks: dict[str, set[int]] = {}
    for rank, call in strange:
        times[str(call)] += 1
        ranks.setdefault(str(call), set()).add(rank)
    return [UnmatchedCall(text, len(ranks[text]), count) for text, count in times.items()]
