"""Find the arguments that a call reads and writes, by its operator's schema."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.disturb.deferred_work import in_place_results
from bitproof.harness.graph.operators import name_of, written_names
from bitproof.harness.operators import named
from bitproof.harness.torch_compat import tree_leaves
from bitproof.harness.torch_operators import schema_of


def written_by(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that a call writes in place, such as the first of `add_`; empty if there are none."""
    # Schemas do not mark the running statistics of a batch norm as written, and it writes them only in training.
    unsaid = named(name_of(function)).counts_in
    names = in_place_results(function) or written_names(function) or unsaid
    given = given_to(function, args, kwargs) if names else {}
    # A batch norm in evaluation reads its statistics, and writes none.
    if names is unsaid and not given.get("training", True):
        return []
    return [given.get(name) for name in names]


def read_by(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that a call reads: all but outputs such as `out=`, whose previous values do not matter."""
    if not (only_written := _only_written(function)):
        return [*args, *kwargs.values()]
    return [value for name, value in given_to(function, args, kwargs).items() if name not in only_written]


@functools.cache
def _only_written(function: Any) -> frozenset[str]:
    schema = schema_of(function)
    # Schemas of c10d do not mark outputs, so their names decide. `tensors`, as of an all-reduce, is read as well.
    outs = [argument.name for argument in schema.arguments if argument.is_out] if schema else []
    return frozenset(outs) | {name for name in in_place_results(function) if name.startswith("output")}


def scalars_of(function: Any, args: Any, kwargs: Any) -> tuple[tuple[str, str], ...]:
    """Return a pair (name, text) for each argument that is a number, string, dtype, or list of these.

    Default values are included.
    """
    given = _defaults(function) | given_to(function, args, kwargs) if schema_of(function) else {}
    return tuple((name, str(value)) for name, value in given.items() if _is_scalar(value))


@functools.cache
def _defaults(function: Any) -> dict[str, object]:
    """Return an operator's argument names with their default values, in the schema's order."""
    return {argument.name: argument.default_value for argument in schema_of(function).arguments}


def _is_scalar(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_scalar, value))
    return isinstance(value, (bool, int, float, str, torch.dtype))


def given_to(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments as name -> value."""
    return dict(zip(_defaults(function), args, strict=False)) | kwargs


_LEAVES = (int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def tensors_in(values: Any) -> list[Tensor]:
    """Return every tensor in nested values, in order."""
    # This runs about six times per call. Torch's own `tree_leaves` looks up every value's type in a registry, and took
    # a third of the time of logging.
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)
    # Only other types, such as a user's registered ones, need torch's slow search.
    elif not isinstance(value, _LEAVES):
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
