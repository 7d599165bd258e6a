"""Split a call over lists of tensors, such as `_foreach_mul_` or a fused optimizer, into a call per index.

So the search for a cause follows a differing parameter to its own inputs, not to all inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from bitproof.harness.graph.operators import name_of, written_names
from bitproof.harness.localize.logs.packing import OVER_LISTS
from bitproof.harness.torch_operators import schema_of


def num_lanes(function: Any, args: Any, kwargs: Any) -> int:
    """Return the length of the lists if a call over lists computes each index independently; else 0.

    For example, 3 for `_foreach_add_` of two lists of 3 tensors.
    """
    schema = schema_of(function)
    if schema is None or not name_of(function).startswith(OVER_LISTS):
        return 0
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    if any(isinstance(given.get(name), Tensor) for name in written_names(function)):
        return 0
    if any(not str(returned.type).startswith("List") for returned in schema.returns):
        return 0
    # Lists of different lengths are not paired index by index.
    lengths = {len(value) for value in given.values() if _is_list(value)}
    return lengths.pop() if len(lengths) == 1 else 0


def lane(values: Iterable[Any], index: int, lanes: int) -> list[Any]:
    """Return those arguments or results of a call over lists, such as `_foreach_add_`, that belong to `index`.

    Each list of length `lanes` is replaced by its element at `index`. Other values stay.
    """
    return [value[index] if _is_list(value) and len(value) == lanes else value for value in values]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(entry, Tensor) for entry in value)
