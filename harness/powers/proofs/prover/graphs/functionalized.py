"""Replaces calls that write tensors by calls that return the new value, each followed by a copy into the tensor.

`x.masked_fill_(m, 0)` becomes `y = where(m, 0, x); x.copy_(y)`. So other code only handles writes by a copy. The same
is done for batch norms, which write their running statistics, and for optimizers' kernels, which write lists of
tensors.
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
"""An argument of an optimizer's kernel.

The kernel writes it only if it scales gradients, but proofs do not admit such a call.
"""


def results_of(results: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the results of a batch norm, followed by its new running statistics as fake values in new memory."""
    return (*results, *(torch.clone(given[name]) for name in known.STATISTICS))


def add_copies(calls: list[Call]) -> None:
    """Add calls that copy a batch norm's new statistics into its arguments. The batch norm is the last of `calls`."""
    given = dict(calls[-1].args)
    # `results_of` added the new statistics behind the other results.
    first = len(calls[-1].value) - len(known.STATISTICS)
    _add_copies(calls, {first + i: (name, given[name]) for i, name in enumerate(known.STATISTICS)})


def add_zeros(calls: list[Call], name: str, written: Any, place: Any) -> None:
    """Add a call that fills a tensor with zeros, before the call `name` overwrites the tensor.

    So the tensor's old content affects no answer. `written` is the tensor as an argument of a call in the data; `place`
    is the origin of the call `name`.
    """
    fields = f"{name} overwrites", known.ZEROS_INTO, (("self", written),), calls[written[1]].value
    calls.append(Call(*fields, writes=("self",), place=place))


def is_where(given: Mapping[str, Any]) -> bool:
    """Return whether a masked fill computes the same bits as `where`.

    The mask must be bool. The value must have the tensor's dtype, or be a Python number that converts to this dtype.
    `given` has the fill's arguments by name.
    """
    x, value = given["self"], given["value"]
    if given["mask"].dtype != torch.bool or str(x.dtype).removeprefix("torch.") not in known.FLOATS | known.WHOLE:
        return False
    if isinstance(value, Tensor):
        return value.dtype == x.dtype and value.device == x.device
    # An integer converts to any of these dtypes, a real number only to a real one.
    return type(value) is int or (type(value) is float and x.is_floating_point())


def is_division_then_copy(given: Mapping[str, Any]) -> bool:
    """Return whether an in-place division computes the same bits as a division followed by a copy.

    This holds for a row-major floating-point CPU tensor divided by a number, or by a tensor of the same dtype and
    layout. `given` has the division's arguments by name.
    """
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
    """Return the number in a scalar constant that is only copied, as in a trace of `torch.tensor(1.0)`.

    None for any other constant, since a call may write it.
    """
    is_real = value.dim() == 0 and not isinstance(value, FakeTensor) and value.dtype in (torch.float32, torch.float64)
    is_copied = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    if not is_real or not is_copied:
        return None
    with disable_current_modes():
        number = float(value)
    return ("float", number.hex()) if known.holds(str(value.dtype).removeprefix("torch."), number) else None


def of_number(op: str, args: Sequence[tuple[str, Any]]) -> tuple[str, Sequence[tuple[str, Any]]]:
    """Return the operator and arguments under which a Python call on numbers is recorded.

    A product with -1 becomes a negation, which has the same bits. Any other call is unchanged.
    """
    if op == f"{known.PYTHON}mul":
        for place, (_, factor) in enumerate(args):
            if factor == -1 or factor == ("float", (-1.0).hex()):
                return f"{known.PYTHON}neg", (("0", args[1 - place][1]),)
    return op, args


def number_of(name: str, number: Any, value: Any, place: Any) -> Call:
    """Return a call that creates a scalar tensor from a Python number.

    A trace of `torch.where` with a number has the same call. So `masked_fill` and `where` become equal.
    """
    options = (
        ("dtype", ("dtype", value.dtype)),
        ("layout", ("enum", "torch.strided")),
        ("device", ("device", value.device)),
    )
    return Call(f"{name} fills", known.NUMBER_TENSOR, (("s", number), *options), value, place=place)


def _add_copies(calls: list[Call], written: Mapping[int, tuple[str, Any]]) -> None:
    # `written` maps the index of a result to (name, tensor) of the argument into which the result is copied.
    index = len(calls) - 1
    # As recorded, the call returns the new values, and the copies below write them.
    several = calls[index] = replace(calls[index], writes=())
    for place, (name, old) in written.items():
        args: tuple[tuple[str, Any], ...] = ("0", ("node", index)), ("1", place)
        calls.append(Call(f"{several.name} {name}", "getitem", args, several.value[place], place=several.place))
        args = ("self", old), ("src", ("node", len(calls) - 1))
        fields = f"{several.name} writes {name}", known.COPY_INTO, args, calls[old[1]].value
        calls.append(Call(*fields, writes=("self",), place=several.place))


def add_updates(
    calls: list[Call], call: Call, given: Mapping[str, Any], names: Sequence[str], layout: Callable[[Any], Any]
) -> Iterator[Any]:
    """Replace a call of an optimizer's kernel by a call per parameter, since the CPU kernel processes them one by one.

    Adds each of these calls to `calls`, followed by copies of its results. Yields the new fake values of each
    parameter.

    - `call`: the call of the kernel, whose arguments are lists.
    - `given`: the kernel's arguments by name, as fake values.
    - `names`: the arguments that the kernel writes according to its schema.
    - `layout`: returns the layout of a fake value.
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
    match argument:
        case ("list", *items) if items and all(isinstance(x, tuple) and x[:1] == ("node",) for x in items):
            return ("list", items[place])
    return argument
