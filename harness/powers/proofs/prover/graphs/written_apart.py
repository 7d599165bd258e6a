"""Rewrites operators that write several tensors as a functional operator, and a copy of each new value into its tensor.

So other code need not handle a batch norm's writes to statistics, which not every schema states, or an optimizer's
kernel on lists: on the CPU it processes parameters one by one, so it becomes one call per parameter.

A masked fill becomes `where`, so it equals code that is written with `where`.

A random fill reads none of its tensor's elements: the tensor is filled with zeros first, so its old content, e.g.
uninitialized memory, affects no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.proof_data import Call
from bitproof.harness.torch_compat import FakeTensor, disable_current_modes

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
    """Fill the tensor with zeros that the next call, named `name`, overwrites."""
    told = f"{name} overwrites", known.ZEROS_INTO, (("self", written),), calls[written[1]].value
    calls.append(Call(*told, writes=("self",), place=place))


def is_choice(given: Mapping[str, Any]) -> bool:
    """Whether a masked fill equals `where`: a bool mask, and a number of the tensor's dtype or convertible to it."""
    x, value = given["self"], given["value"]
    if given["mask"].dtype != torch.bool or str(x.dtype).removeprefix("torch.") not in known.FLOATS | known.WHOLE:
        return False
    if isinstance(value, Tensor):
        return value.dtype == x.dtype and value.device == x.device
    return type(value) is int or (type(value) is float and x.is_floating_point())


def is_apart(given: Mapping[str, Any]) -> bool:
    """Whether an in-place division of a row-major CPU tensor is by a real number, or by a tensor of the same layout."""
    x, other = given["self"], given["other"]
    if not x.is_floating_point() or x.device.type != "cpu" or not all(isinstance(n, int) for n in x.shape):
        return False
    is_alike = isinstance(other, Tensor) and (other.dtype, other.shape, other.stride()) == (
        x.dtype,
        x.shape,
        x.stride(),
    )
    return x.is_contiguous() and (is_alike or isinstance(other, int | float | torch.SymFloat)) and len(given) == 2


def copied_number(node: Node, value: Tensor) -> Any:
    """The number in a scalar constant that is only copied, as in a trace of `torch.tensor(1.0)`; None otherwise.

    Other tensors may be written by a call.
    """
    is_real = value.dim() == 0 and not isinstance(value, FakeTensor) and value.dtype in (torch.float32, torch.float64)
    is_copied = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    if not is_real or not is_copied:
        return None
    with disable_current_modes():
        number = float(value)
    return ("float", number.hex()) if known.holds(str(value.dtype).removeprefix("torch."), number) else None


def of_number(op: str, args: Sequence[tuple[str, Any]]) -> tuple[str, Sequence[tuple[str, Any]]]:
    """A Python call on numbers; a product with -1 becomes a negation, which has the same bits."""
    if op == f"{known.PYTHON}mul":
        for place, (_, factor) in enumerate(args):
            if factor == -1 or factor == ("float", (-1.0).hex()):
                return f"{known.PYTHON}neg", (("0", args[1 - place][1]),)
    return op, args


def number_of(name: str, number: Any, value: Any, place: Any) -> Call:
    """The call that creates a scalar tensor from a number, as `torch.where` traces it."""
    told = (
        ("dtype", ("dtype", value.dtype)),
        ("layout", ("enum", "torch.strided")),
        ("device", ("device", value.device)),
    )
    return Call(f"{name} fills", known.NUMBER_TENSOR, (("s", number), *told), value, place=place)


def _add_copies(calls: list[Call], written: Mapping[int, tuple[str, Any]]) -> None:
    """After the last call, copy its results at these indices into the named arguments."""
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
    """Add an optimizer's kernel over lists as one call per parameter, and yield the new values of each parameter.

    `given` has the kernel's arguments by name, as fake values; `names` are the arguments that it writes, by its schema;
    `layout` returns the layout of a value.
    """
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
