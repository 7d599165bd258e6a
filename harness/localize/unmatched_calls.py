"""Find calls of an EQUAL candidate whose outputs the reference never computed: possible defects that no record shows.

Rounding may hide their effect. But such a call need not be wrong: passes add calls that join tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from bitproof.harness.localize.logs.calls import READS_OUT, Call
from bitproof.harness.localize.logs.packing import PACKING

MAX_LISTED = 20


class UnmatchedCall(NamedTuple):
    """An unmatched call as text, the number of `ranks` on which it is unmatched, and its number of calls on them
    (`times`).
    """

    call: str
    ranks: int
    times: int


class Look(NamedTuple):
    """Two lists of indices of a rank's calls in a step. The reference makes none of these calls.

    - `unmatched`: calls with an output that the reference has nowhere.
    - `packing`: calls that only view or join values that the reference has.
    """

    unmatched: list[int]
    packing: list[int]


def describe_packing(number: int) -> str:
    """Return the text ", except N that only pack right values," for a sentence that counts calls; "" if N is 0."""
    return f", except {number} that only pack right values," if number else ""


def listed(found: Sequence[UnmatchedCall]) -> str:
    """Return the first MAX_LISTED unmatched calls in a line, followed by the number of further calls.

    For example, "mul.Tensor of layers.0 (forward) x 2 on 4 ranks; and 3 more".
    """
    lines = [
        f"{unmatched.call} x {unmatched.times}" + (f" on {unmatched.ranks} ranks" if unmatched.ranks > 1 else "")
        for unmatched in found[:MAX_LISTED]
    ]
    return "; ".join([*lines, *([f"and {len(found) - MAX_LISTED} more"] if len(found) > MAX_LISTED else [])])


def find_unmatched(reference: Sequence[Call], candidate: Sequence[Call]) -> Look:
    """Compare two logs of a step on the same rank. Return the candidate's unmatched and packing calls as a `Look`."""
    # Inputs count as well: a value from before the step, such as a parameter, is no call's output.
    right = {value for call in reference for value in (*call.inputs, *call.outputs, *call.aliases)}
    made: defaultdict[tuple[object, ...], set[tuple[str, ...]]] = defaultdict(set)
    for call in reference:
        made[_question(call)].add(call.outputs)
    found = Look([], [])
    # In order, as a pack makes its output a right value: a view of a new bucket is right as well.
    for index, call in enumerate(candidate):
        is_read_out = call.operator == READS_OUT and right.issuperset(call.inputs)
        # Eager may read a right number without an operator, for example by `tolist`.
        if right.issuperset(call.outputs) or is_read_out:
            continue
        # A pass may cut and join tensors. But a cut that the reference makes too must have the same result.
        packs = call.view or call.operator.partition(".")[0] in PACKING
        if packs and right.issuperset(call.inputs) and _question(call) not in made:
            right.update(call.outputs)
            found.packing.append(index)
        else:
            found.unmatched.append(index)
    return found


def _question(call: Call) -> tuple[object, ...]:
    """Return everything that determines a call's result: its operator, inputs and numbers."""
    return call.operator, call.inputs, call.scalars


def summed_up(unmatched: Sequence[tuple[int, Call]]) -> list[UnmatchedCall]:
    """Count unmatched calls, which are pairs of rank and call, by operator and place.

    Returns an `UnmatchedCall` for each operator and place, in the order of the first of its calls.
    """
    times: Counter[str] = Counter()
    ranks: dict[str, set[int]] = {}
    for rank, call in unmatched:
        times[str(call)] += 1
        ranks.setdefault(str(call), set()).add(rank)
    return [UnmatchedCall(text, len(ranks[text]), count) for text, count in times.items()]
