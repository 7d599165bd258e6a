"""Operators that write several tensors, as data: one that gives their new values, and a copy of each into the old.

So whoever reads a graph as data need know nothing of a batch norm that writes statistics, which not every schema names,
nor of an optimizer's kernel, which is handed lists: on the CPU it goes through them one by one, so it is written down
once for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bitproof.harness.certificate.data import Call
from bitproof.harness.prove import known_operators as known

UNCHANGED = "grads"
"""What an optimizer's kernel writes only where it scales gradients, which no proof takes."""


def results_of(results: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a batch norm gives besides: new statistics, in memory of their own."""
    return (*results, *(torch.clone(given[name]) for name in known.STATISTICS))


def add_copies(calls: list[Call]) -> None:
    """After a batch norm, the last of these calls: its new statistics are taken, and copied into what it was handed."""
    given = dict(calls[-1].args)
    first = len(calls[-1].value) - len(known.STATISTICS)
    _add_copies(calls, {first + i: (name, given[name]) for i, name in enumerate(known.STATISTICS)})


def _add_copies(calls: list[Call], written: Mapping[int, tuple[str, Any]]) -> None:
    """After the last of these calls: its results of these places are taken, and copied into arguments of a name."""
    index = len(calls) - 1
    several = calls[index] = replace(calls[index], writes=())
    for place, (name, old) in written.items():
        args: tuple[tuple[str, Any], ...] = ("0", ("node", index)), ("1", place)
        calls.append(Call(f"{several.name} {name}", "getitem", args, several.value[place], place=several.place))
        args = ("self", old), ("src", ("node", len(calls) - 1))
        told = f"{several.name} writes {name}", known.COPY_INTO, args, calls[old[1]].value
        calls.append(Call(*told, writes=("self",), place=several.place))


def add_updates(
    calls: list[Call], call: Call, given: Mapping[str, Any], names: Sequence[str], layout: Callable[[Any], Any]
) -> Iterator[Any]:
    """An optimizer's kernel, one parameter after the other. `given` are its arguments on fake values, `names` those
    that its schema says it writes; `layout` tells how one of the new values that are yielded lies."""
    for place in range(len(given["self"])):
        args = tuple((name, _one_of(x, place)) for name, x in call.args)
        written = [name for name in names if given.get(name)]
        values = [torch.clone(given[name][place]) for name in written]
        calls.append(replace(call, name=f"{call.name} {place}", args=args, value=tuple(map(layout, values))))
        olds = {i: (name, dict(args)[name][1]) for i, name in enumerate(written) if name != UNCHANGED}
        _add_copies(calls, olds)
        yield values  # whose memory must not become another's as long as calls are added


def _one_of(argument: Any, place: int) -> Any:
    """A list of tensors' own at a place, as a list; any other argument as it is."""
    match argument:
        case ("list", *items) if items and all(isinstance(x, tuple) and x[:1] == ("node",) for x in items):
            return ("list", items[place])
    return argument
