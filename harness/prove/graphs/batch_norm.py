"""A batch norm that counts its batch, as data: an operator that gives new statistics, and a copy of each into the old.

So whoever reads a graph as data need know nothing of an operator that writes what not every schema names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bitproof.harness.certificate.data import Call
from bitproof.harness.prove import known_operators as known


def results_of(results: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the operator gives besides: new statistics, in memory of their own."""
    return (*results, *(torch.clone(given[name]) for name in known.STATISTICS))


def add_copies(calls: list[Call]) -> None:
    """After a batch norm, the last of these calls: its new statistics are taken, and copied into what it was handed."""
    index = len(calls) - 1
    norm = calls[index] = replace(calls[index], writes=())
    for place, name in enumerate(known.STATISTICS, len(norm.value) - len(known.STATISTICS)):
        args: tuple[tuple[str, Any], ...] = ("0", ("node", index)), ("1", place)
        calls.append(Call(f"{norm.name} {name}", "getitem", args, norm.value[place], place=norm.place))
        old = dict(norm.args)[name]
        args = ("self", old), ("src", ("node", len(calls) - 1))
        written = f"{norm.name} writes {name}", known.COPY_INTO, args, calls[old[1]].value
        calls.append(Call(*written, writes=("self",), place=norm.place))
