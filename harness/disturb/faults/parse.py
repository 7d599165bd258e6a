"""Parses `--inject`, and refuses faults that a case can never reach. Loads no torch."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.disturb.entry import Named, catalogue
from bitproof.harness.disturb.kinds import FAULTS, Fault, RankFault
from bitproof.harness.errors import UsageError


def known_faults() -> str:
    """Return the syntax of every fault, with optional fields in brackets, and the command that lists the catalogue."""
    kinds = "; ".join(f"{kind}:{_syntax(fault)}" for kind, fault in FAULTS.items())
    return f"{kinds}; or a name of the catalogue, which `bitproof faults --list` shows"


def parse_fault(text: str) -> Fault:
    """Parse a fault: `kind:field=value,...`, or a name of the catalogue.

    Raises UsageError for an unknown kind, name or field, or a value of the wrong type.
    """
    kind, colon, rest = text.partition(":")
    if not colon and kind in catalogue():
        return Named(name=kind)
    if kind not in FAULTS:
        raise UsageError(f"unknown fault {kind!r}", expected=known_faults(), fix=_nearest(kind))
    fault = FAULTS[kind]
    # Types are texts here, since the module of faults postpones annotations.
    types = {f.name: f.type for f in fields(fault)}
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        name, equals, value = item.partition("=")
        # An unknown name, no "=", no value, or a name for the second time.
        if name not in types or not equals or not value or name in values:
            raise UsageError(f"fault {kind} does not understand {item!r}", expected=f"{kind}:{_syntax(fault)}")
        values[name] = value if types[name] == "str" else _natural(kind, item, value)
    if missing := [name for name in _required(fault) if name not in values]:
        raise UsageError(
            f"fault {kind} lacks {', '.join(missing)}", expected=f"{kind}:{_syntax(fault)}", found=repr(text)
        )
    return fault(**values)


def check_fault(fault: Fault, case: Case) -> None:
    """Raise UsageError for a fault that can never fire in this case, e.g. at step 5 of 3."""
    if fault.step >= case.steps:
        raise UsageError(
            f"fault {fault} never fires in case {case.name}",
            expected=f"step in 0..{case.steps - 1}",
            found=f"step={fault.step}",
        )
    world_size = case.parallelism.world_size
    if isinstance(fault, RankFault) and fault.rank >= world_size:
        raise UsageError(
            f"fault {fault} never fires in case {case.name}",
            expected=f"rank in 0..{world_size - 1}",
            found=f"rank={fault.rank}",
        )
    if isinstance(fault, Named) and (unmet := fault.row.unmet(case)):
        raise UsageError(f"fault {fault} cannot strike in case {case.name}", expected="; ".join(unmet))


def _nearest(name: str) -> str | None:
    close = difflib.get_close_matches(name, [*catalogue(), *FAULTS], n=3)
    return f"did you mean {' or '.join(close)}?" if close else None


def _natural(kind: str, item: str, value: str) -> int:
    # `isdigit` alone also accepts digits that `int` refuses, such as superscripts.
    if not value.isascii() or not value.isdigit():
        raise UsageError(f"fault {kind} does not understand {item!r}", expected="an integer of 0 or more")
    return int(value)


def _required(fault: type[Fault]) -> list[str]:
    # Both are MISSING for a field without a default.
    return [f.name for f in fields(fault) if f.default is f.default_factory]


def _syntax(fault: type[Fault]) -> str:
    required = _required(fault)
    written = {"str": "NAME", "int": "N"}
    # Fields with an empty default are alternatives, such as the four kinds of tensors of flip-bit.
    one_of = [f.name for f in fields(fault) if f.default == ""]
    parts = [
        f"{f.name}={written[str(f.type)]}" if f.name in required else f"[{f.name}={f.default}]"
        for f in fields(fault)
        if f.name not in one_of
    ]
    return ",".join([*(["|".join(one_of) + "=NAME"] if one_of else []), *parts])
