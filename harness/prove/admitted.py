"""The operators that a proof may meet: those that did as their schemas say in all that a scan tried.

The list stands in `admitted.txt`, which `tests/benchmarks/scan_operators.py --write` writes, and checks every night. An
operator that the scan could not call is unknown, so it is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).with_name("admitted.txt")


@functools.cache
def names() -> frozenset[str]:
    """Their names, `aten.add.Tensor`."""
    rows = (line.split() for line in FILE.read_text().splitlines() if line and not line.startswith("#"))
    return frozenset(f"{packet}.{overload}" for packet, *overloads in rows for overload in overloads)


def write(found: Iterable[str]) -> None:
    """Write the list: a row an operator, with its overloads."""
    overloads: dict[str, list[str]] = {}
    for name in sorted(found):
        packet, _, overload = name.rpartition(".")
        overloads.setdefault(packet, []).append(overload)
    rows = [" ".join([packet, *own]) for packet, own in overloads.items()]
    FILE.write_text("\n".join(["# Written by tests/benchmarks/scan_operators.py --write.", *rows, ""]))
    names.cache_clear()
