"""Brings equivalent arguments of a call into the same form: `dim=-1` of three dims becomes `dim=2`.

The operator computes the same bits in the same layout with either form. A scan (`tests/benchmarks/scan_arguments.py`)
confirmed this for the arguments in `argument_forms.txt`. Other arguments stay unchanged.

1. Dims are counted from the start.
2. Dims whose order does not matter, such as those of a sum, are in ascending order.
3. An integer becomes the equal float, if the operator takes floats: `2` becomes `2.0`.
4. An argument that equals its default is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bitproof.harness.powers.proofs.prover.proof_data import Call, Tensor, nodes_in
from bitproof.harness.torch_operators import schema_of

DIM, ORDER, NUMBER = FORMS = ("dim", "order", "number")
"""The kinds of equivalent arguments.

- "dim": a dim counted from the start or from the end.
- "order": dims in any order.
- "number": an integer or the equal float.
"""

FILE = Path(__file__).with_name("argument_forms.txt")

MOST = 1 << 24
"""float32 represents all integers up to this exactly."""

TRIED = {"float64", "float32", "bfloat16"}
"""The tensor dtypes for which the scan compared integers with equal floats."""


@functools.cache
def listed() -> frozenset[tuple[str, str, str]]:
    """Return the equivalences that the scan confirmed, as (kind, operator, argument).

    For example, ("dim", "aten._log_softmax.default", "dim") if this dim may be counted from the start or from the end.
    """
    rows = (line.split() for line in FILE.read_text().splitlines() if line and not line.startswith("#"))
    return frozenset((form, name, argument) for form, name, *arguments in rows for argument in arguments)


def write(found: Iterable[tuple[str, str, str]]) -> None:
    rows: dict[str, list[str]] = {}
    for form, name, argument in sorted(found, key=lambda x: (FORMS.index(x[0]), *x[1:])):
        rows.setdefault(f"{form} {name}", []).append(argument)
    lines = [" ".join([row, *arguments]) for row, arguments in rows.items()]
    FILE.write_text("\n".join(["# Written by tests/benchmarks/scan_arguments.py --write.", *lines, ""]))
    listed.cache_clear()


def canonical(target: Any, given: Sequence[tuple[str, Any]], calls: Sequence[Call]) -> list[tuple[str, Any]]:
    """Return the arguments of a call in canonical form, without arguments that equal their defaults.

    - `target`: the operator.
    - `given`: (name, argument as data) for each argument.
    - `calls`: the earlier calls, to which an argument may refer by index.
    """
    schema = schema_of(target)
    if schema is None:
        return [*given]
    types = {x.name: str(x.type) for x in schema.arguments}
    defaults = {x.name: _data(x.default_value) for x in schema.arguments if x.has_default_value()}
    read = [calls[i].value for _, value in given for i in nodes_in(value)]
    tensors = [x for x in read if isinstance(x, Tensor)]
    form = functools.partial(_one_form, str(target), tensors)
    found = []
    for name, value in given:
        value = form(name, types.get(name, ""), value)
        # Compared after both are in canonical form: a default of -1 equals the last dim.
        if name not in defaults or form(name, types.get(name, ""), defaults[name]) != value:
            found.append((name, value))
    return found


def _one_form(op: str, tensors: Sequence[Tensor], name: str, kind: str, value: Any) -> Any:
    if (DIM, op, name) in listed() and tensors:
        # torch accepts dims -1 and 0 for a tensor without dims.
        value = _from_start(value, max(len(tensors[0].shape), 1))
        if (ORDER, op, name) in listed() and isinstance(value, tuple) and all(isinstance(n, int) for n in value[1:]):
            value = ("list", *sorted(value[1:]))
    # A truth value is ("bool", ...) here, so an int is a number. If the schema's type is not float, the scan must have
    # compared both, for the dtype of all tensors.
    if isinstance(value, int) and abs(value) <= MOST and (kind == "float" or _is_real(op, tensors, name)):
        value = ("float", float(value).hex())
    return value


def _from_start(value: Any, rank: int) -> Any:
    match value:
        case int() if -rank <= value < 0:
            return value + rank
        case ("list", *items):
            return ("list", *(_from_start(item, rank) for item in items))
    return value


def _is_real(op: str, tensors: Sequence[Tensor], name: str) -> bool:
    dtypes = {x.dtype for x in tensors}
    return (NUMBER, op, name) in listed() and len(dtypes) == 1 and dtypes <= TRIED


def _data(value: Any) -> Any:
    match value:
        case bool():
            return ("bool", str(value))
        case None:
            return ("none",)
        case float():
            return ("float", value.hex())
        case str():
            return ("str", value)
        case torch.dtype():
            return ("dtype", str(value).removeprefix("torch."))
        case list() | tuple():
            return ("list", *map(_data, value))
    return value
