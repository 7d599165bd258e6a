"""Assert that two tensors, or two structures of them, agree in every bit.

`torch.equal` regards 0.0 and -0.0 as equal and a NaN as unequal to itself. Here bits decide. torch is imported on the
first call.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bitproof.harness.errors import RecordingError

if TYPE_CHECKING:
    from torch import Tensor

    from bitproof.harness.compare.bits import BitDifference

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_MAX_SHOWN = 10


def assert_bitwise_equal(actual: Any, expected: Any, *, msg: str | None = None) -> None:
    """Assert that two tensors agree in dtype, in shape and in every bit, including -0.0 and the payloads of NaNs.

        assert_bitwise_equal(model(x), model(x))

    - Nested mappings, lists, tuples and dataclasses must also agree in types, keys and lengths.
    - Numbers, strings and None in them must agree in type and value, floats in their bits.
    - DTensors must agree in placements, global shape and this rank's local shard.
    - Devices and strides may differ.

    Raises AssertionError, which starts with `msg` if given, and describes the first ten differing parts. For tensors, a
    part states the number of differing elements, the first of them with its bits, and distances in ULPs.

    Raises TypeError for values without comparable bits: a sparse, nested, quantized, fake or freed tensor, or any other
    kind of object.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    problems = list(_differences(actual, expected, ""))
    if not problems:
        return
    shown = problems[:_MAX_SHOWN]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more parts")
    raise AssertionError("\n".join(filter(None, [msg, *shown])))


def _differences(actual: Any, expected: Any, path: str) -> Iterator[str]:
    """Yield a description of each part that differs, in the order of `expected`. `path` is the path to both values."""
    import torch

    at = f" at {path}" if path else ""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        yield from _tensor_differences(actual, expected, at)
    # Exactly the same type: True == 1 and 1 == 1.0 in Python, but they are other values.
    elif type(actual) is not type(expected):
        yield f"types differ{at}: {_name(actual)} where {_name(expected)} is expected"
    elif isinstance(expected, Mapping):
        yield from _key_differences(actual, expected, at)
        for key in expected:
            if key in actual:
                yield from _differences(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            yield f"lengths differ{at}: {len(actual)} where {len(expected)} is expected"
        # The common elements are compared even if lengths differ: they show where an element is missing.
        for index, (left, right) in enumerate(zip(actual, expected, strict=False)):
            yield from _differences(left, right, f"{path}[{index}]")
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        for field in dataclasses.fields(expected):
            left, right = getattr(actual, field.name), getattr(expected, field.name)
            yield from _differences(left, right, f"{path}.{field.name}")
    # Floats are compared as bytes: -0.0 == 0.0 and nan != nan in Python.
    elif isinstance(expected, _SCALARS):
        if _bits(actual) != _bits(expected):
            yield f"values differ{at}: {actual!r} where {expected!r} is expected"
    else:
        raise TypeError(f"{_name(expected)}{at} has no bits to compare: neither a tensor, a structure nor a number")


def _key_differences(actual: Mapping[Any, Any], expected: Mapping[Any, Any], at: str) -> Iterator[str]:
    missing = [repr(key) for key in expected if key not in actual]
    extra = [repr(key) for key in actual if key not in expected]
    if missing or extra:
        parts = [f"{what} {', '.join(keys)}" for what, keys in (("missing", missing), ("unexpected", extra)) if keys]
        yield f"keys differ{at}: {'; '.join(parts)}"


def _tensor_differences(actual: Tensor, expected: Tensor, at: str) -> Iterator[str]:
    from bitproof.harness.compare.bits import bit_difference, tensor_type

    layouts = [_layout(tensor) for tensor in (actual, expected)]
    # Shards of other placements have no common elements to compare.
    if layouts[0] != layouts[1]:
        yield f"tensors differ{at} in how they are spread over ranks: {layouts[0]} where {layouts[1]} is expected"
        return
    left, right = (_local(tensor, at) for tensor in (actual, expected))
    if left.dtype != right.dtype:
        yield f"dtypes differ{at}: {tensor_type(left)} where {tensor_type(right)} is expected"
    elif left.shape != right.shape:
        yield f"shapes differ{at}: {tensor_type(left)} where {tensor_type(right)} is expected"
    elif not (difference := bit_difference(right, left)).is_equal:
        yield _describe(difference, f"{tensor_type(right)} tensors differ{at}")


def _describe(difference: BitDifference, head: str) -> str:
    lines = [
        f"{head}: {difference.elements_differing} of {difference.elements} elements",
        f"  first: index {difference.first_index}, {difference.candidate_bits} where "
        f"{difference.reference_bits} is expected",
    ]
    if difference.max_ulp is not None and difference.histogram is not None:
        counts = ", ".join(f"{bucket}: {count}" for bucket, count in difference.histogram.items())
        lines.append(f"  by at most {difference.max_ulp} ULP; elements by ULPs: {counts}")
    return "\n".join(lines)


def _layout(tensor: Tensor) -> str:
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return "a tensor of one rank"
    return f"a DTensor of shape {list(tensor.shape)} placed {', '.join(map(str, placements))}"


def _local(tensor: Tensor, at: str) -> Tensor:
    """This rank's part of a tensor, as a dense tensor. Raises TypeError for a tensor without bits, such as a fake one.

    The error names the tensor's place in the compared values, `at`.
    """
    from bitproof.harness.capture.digest import plain

    try:
        return plain(tensor)
    except RecordingError as error:
        raise TypeError(f"a tensor{at} has no bits to compare: it is {error.found}") from error


def _bits(value: Any) -> Any:
    """A scalar in comparable form: floats by their bytes, other values unchanged."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    return (_bits(value.real), _bits(value.imag)) if isinstance(value, complex) else value


def _name(value: Any) -> str:
    return type(value).__qualname__
