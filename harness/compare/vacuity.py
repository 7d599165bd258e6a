"""Agreement that shows nothing: tensors without elements, of NaN alone, gradients and parameters of zeros alone.

Two systems that both lost every value agree in every bit. So at every step each kind that a step must leave needs one
tensor, on any rank, whose agreement shows something. Single tensors that never show anything, such as the gradient of
what no token reached, are remarked upon.

What differs is never vacuous: zeros against NaN are a difference, and are told as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.case import Case, Kind
from harness.records import REQUIRED_KINDS, Key, Record, required_kinds

_NUM_NAMED = 3
_CONTENTS = {"nan": "all NaN", "zero": "all zeros"}
_ZERO_IS_VACUOUS: tuple[Kind, ...] = ("grad", "param")

Pairs = Mapping[Key, tuple[Record, Record]]


def vacuous_steps(pairs: Pairs, case: Case) -> Iterator[str]:
    """A sentence for each required kind whose agreement shows nothing at some step, on any rank."""
    found: dict[tuple[str, int], set[str | None]] = {}
    for key, pair in pairs.items():
        found.setdefault((key.kind, key.step), set()).add(_vacuity(key, pair))
    for kind in required_kinds(case):
        steps = [step for step in range(case.steps) if None not in found.get((kind, step), {None})]
        if steps:
            reasons = sorted({reason for step in steps for reason in found[kind, step] if reason})
            yield f"on every rank each {kind} is {' or '.join(reasons)} at {_tell_steps(steps, case)}"


def vacuous_tensors(pairs: Pairs) -> Iterator[str]:
    """A sentence for each kind and reason of which there are tensors that show nothing at any step on any rank."""
    found: dict[tuple[Kind, str], set[str | None]] = {}
    for key, pair in pairs.items():
        found.setdefault((key.kind, key.name), set()).add(_vacuity(key, pair))
    for kind in REQUIRED_KINDS:
        tensors = {name: reasons for (of, name), reasons in found.items() if of == kind}
        vacuous = {name: reasons for name, reasons in tensors.items() if None not in reasons}
        if vacuous:
            reasons = sorted({reason for found in vacuous.values() for reason in found if reason})
            names = ", ".join(list(vacuous)[:_NUM_NAMED])
            more = f" and {len(vacuous) - _NUM_NAMED} more" if len(vacuous) > _NUM_NAMED else ""
            yield (
                f"{len(vacuous)} of {len(tensors)} {kind} tensors show nothing by their agreement, being "
                f"{' or '.join(reasons)} at every step on every rank: {names}{more}"
            )


def _vacuity(key: Key, pair: tuple[Record, Record]) -> str | None:
    """Why a pair that agrees shows nothing; None where it shows something."""
    reference, candidate = pair
    if reference[:3] != candidate[:3]:
        return None
    if 0 in reference.shape:
        return "without elements"
    content = reference.content or candidate.content or ("nan" if reference.value == "nan" else None)
    if content == "zero" and key.kind not in _ZERO_IS_VACUOUS:
        return None
    return _CONTENTS.get(content or "")


def _tell_steps(steps: Sequence[int], case: Case) -> str:
    if len(steps) == case.steps:
        return "every step"
    named = ", ".join(map(str, steps[:_NUM_NAMED]))
    more = f" and {len(steps) - _NUM_NAMED} more" if len(steps) > _NUM_NAMED else ""
    return f"step{'s' if len(steps) > 1 else ''} {named}{more} of {case.steps}"
