"""Sums up the findings about calls by module and direction, and states where unseen errors disappeared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from bitproof.harness.case import pattern_of
from bitproof.harness.operators import Hides, named
from bitproof.harness.powers.sensitivity.examine import CallFinding
from bitproof.harness.powers.sensitivity.program import Program, ReplayedCall
from bitproof.harness.powers.sensitivity.records import FormulaRow, Sensitivity, SensitivityRow, UnseenCall

NO_MODULE = "no module"


def summed_up(program: Program, found: Mapping[int, CallFinding], at_once: set[int]) -> Sensitivity:
    """Return a case's sensitivity, with rows in program order.

    - `found`: index of an examined call -> finding.
    - `at_once`: calls whose error was seen at the first try: a single changed element in the first step.
    """
    rows: dict[tuple[str, str], Counter[str]] = {}
    unseen: list[UnseenCall] = []
    formulas: dict[tuple[str, str], Counter[str]] = {}
    for call in (call for call in program.calls if call.counts):
        row = rows.setdefault((_module(call), _direction(call)), Counter())
        row["calls"] += 1
        if (finding := found.get(call.index)) is None:
            continue
        # A later step may have shown what seemed blind in an earlier one.
        is_blind = finding.is_blind and finding.shown is None
        row.update(tried=1, seen=finding.shown is not None, at_once=call.index in at_once, blind=is_blind)
        for name, answer in finding.neighbours.items():
            formulas.setdefault((call.operator, name), Counter()).update([answer, "tried"])
        if finding.shown is None:
            unseen.append(_unseen(program, call, finding, is_blind))
    return Sensitivity(
        rows=[SensitivityRow(module=module, direction=way, **row) for (module, way), row in rows.items()],
        unseen=unseen,
        shown=dict(Counter(finding.shown for finding in found.values() if finding.shown is not None)),
        formulas=[FormulaRow(operator=op, formula=name, **row) for (op, name), row in formulas.items()],
    )


def _module(call: ReplayedCall) -> str:
    return NO_MODULE if call.place.module is None else pattern_of(call.place.module) or "the model itself"


def _direction(call: ReplayedCall) -> str:
    return call.place.direction or "forward"


def _unseen(program: Program, call: ReplayedCall, finding: CallFinding, is_blind: bool) -> UnseenCall:
    return UnseenCall(
        operator=call.operator,
        module=NO_MODULE if call.place.module is None else call.place.module or "the model itself",
        direction=_direction(call),
        chunk=call.place.chunk,
        node=call.node,
        is_blind=is_blind,
        reason=_reason(program, finding, "blind" if is_blind else "lost"),
    )


def _reason(program: Program, finding: CallFinding, how: Literal["blind", "lost"]) -> str:
    """Describe where a call's error disappeared, such as `rounded away in the cast to bfloat16`.

    If there are several places, the most frequent comes first. `how` is "blind" if even gross errors disappeared, and
    "lost" if only errors of 1 ULP did.
    """
    places = Counter(_where_lost(None if index < 0 else program.calls[index], how) for index in finding.lost)
    return ", ".join(text for text, _ in places.most_common(3))


def _where_lost(call: ReplayedCall | None, how: Literal["blind", "lost"]) -> str:
    if call is None:
        return "nothing reads it"
    name = call.operator
    row = named(name)
    if row.hides is Hides.CHOICE:
        return f"not among what {name} takes"
    if row.hides is Hides.ORDER:
        return f"{name} decides as before"
    if row.hides is Hides.SHAPE or row.reads_layout:
        return f"{name} reads its shape alone"
    # `index_put` with accumulate=True adds, and overwrites nothing.
    if row.hides is Hides.MASK and not (name == "index_put" and True in call.args):
        return f"overwritten or masked in {name}"
    if how == "blind":
        return f"multiplied by zero in {name}" if row.hides is Hides.PRODUCT else f"without effect in {name}"
    if name == "_to_copy":
        return f"rounded away in the cast to {str(call.kwargs.get('dtype', '')).removeprefix('torch.')}"
    return f"rounded away in {name}"
