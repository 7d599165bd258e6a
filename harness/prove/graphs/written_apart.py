"""Rewrites operators that write several tensors as one that returns the new values, and a copy of each into the old
tensor.

So other code need not handle a batch norm's writes to statistics, which not every schema states, or an optimizer's
kernel on lists: on the CPU it processes parameters one by one, so it becomes one call per parameter.

A masked fill becomes a choice, `where`, so that it is one with what users write so.

Draws that fill a tensor read none of its elements: it is written with zeros before, so that what it held, such as
uninitialized memory, decides no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.certificate.data import Call
from bitproof.harness.prove import known_operators as known

UNCHANGED = "grads"
"""Arguments that an optimizer's kernel writes only when it scales gradients, which proofs do not admit."""


def results_of(results: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A batch norm's additional results: new statistics, in new memory."""
    return (*results, *(torch.clone(given[name]) for name in known.STATISTICS))


def add_copies(calls: list[Call]) -> None:
    """After a batch norm, the last of these calls, copy its new statistics into its arguments."""
    given = dict(calls[-1].args)
    first = len(calls[-1].value) - len(known.STATISTICS)
    _add_copies(calls, {first + i: (name, given[name]) for i, name in enumerate(known.STATISTICS)})


def add_zeros(calls: list[Call], name: str, written: Any, place: Any) -> None:
    """Fill with zeros what the next call, of this name, overwrites."""
    told = f"{name} overwrites", known.ZEROS_INTO, (("self", written),), calls[written[1]].value
    calls.append(Call(*told, writes=("self",), place=place))


def is_choice(given: Mapping[str, Any]) -> bool:
    """Whether a masked fill is a choice, by truth values, between a number and a tensor's elements in one dtype."""
    x, value = given["self"], given["value"]
    if given["mask"].dtype != torch.bool or str(x.dtype).removeprefix("torch.") not in known.FLOATS | known.WHOLE:
        return False
    if isinstance(value, Tensor):
        return value.dtype == x.dtype and value.device == x.device
    return type(value) is int or (type(value) is float and x.is_floating_point())


def number_of(name: str, number: Any, value: Any, place: Any) -> Call:
    """The call that makes a tensor without dims of a number, as `torch.where` traces it."""
    told = (
        ("dtype", ("dtype", value.dtype)),
        ("layout", ("enum", "torch.strided")),
        ("device", ("device", value.device)),
    )
    return Call(f"{name} fills", known.NUMBER_TENSOR, (("s", number), *told), value, place=place)


def _add_copies(calls: list[Call], written: Mapping[int, tuple[str, Any]]) -> None:
    """After the last of these calls, copy its results at these indices into the arguments of these names."""
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
    """Add an optimizer's kernel, one parameter after the other. `given` are its arguments on fake values, `names` those
    that its schema writes; `layout` returns the layout of a new value that is yielded."""
    for place in range(len(given["self"])):
        args = tuple((name, _one_of(x, place)) for name, x in call.args)
        written = [name for name in names if given.get(name)]
        values = [torch.clone(given[name][place]) for name in written]
        calls.append(replace(call, name=f"{call.name} {place}", args=args, value=tuple(map(layout, values))))
        olds = {i: (name, dict(args)[name][1]) for i, name in enumerate(written) if name != UNCHANGED}
        _add_copies(calls, olds)
        yield values  # kept alive, so that their memory is not reused while calls are added


def _one_of(argument: Any, place: int) -> Any:
    """One element of a list of tensors, as a list; any other argument unchanged."""
    match argument:
        case ("list", *items) if items and all(isinstance(x, tuple) and x[:1] == ("node",) for x in items):
            return ("list", items[place])
    return argument
