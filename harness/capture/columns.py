"""Convert columns of a recording's table to and from Arrow's memory layout, without pyarrow's slow functions.

- `pa.array` and `to_numpy` import pandas if it is installed, which takes each process 0.25 s.
- `to_pylist` makes an Arrow object for each value, which would take most of the time of reading a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.compute as pc

_IS_HEX = numpy.isin(numpy.arange(256), list(b"0123456789abcdef"))


def column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """Return an Arrow array of the type of `field`.

    Depending on that type, each value is an int32, a string or None, or a list of int64.
    """
    if pa.types.is_list(field.type):
        # Arrow stores the items of all lists one after another, and the index at which each list begins.
        offsets = _offsets([len(value) for value in values])
        items = _numbers([item for value in values for item in value], field.type.value_type)
        return pa.Array.from_buffers(field.type, len(values), [None, offsets], children=[items])
    if pa.types.is_string(field.type):
        validity = _validity(values)
        texts = [value or "" for value in values] if validity else values
        joined = "".join(texts)
        content = joined.encode()
        # Equal sizes mean that all characters are ASCII, so a text has as many bytes as characters.
        sizes = map(len, texts if len(content) == len(joined) else [text.encode() for text in texts])
        return pa.Array.from_buffers(field.type, len(values), [validity, _offsets(list(sizes)), pa.py_buffer(content)])
    return _numbers(values, field.type)


def bools(values: Any) -> pa.Array:
    """Return an Arrow array of a numpy array of bools."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])


def values_of(column: pa.ChunkedArray) -> list[Any]:
    """Convert an Arrow column that the function `column` made back into Python objects. Lists become tuples.

    Equal strings in a chunk are the same object. Numbers, lists and their items must not be null.
    """
    return [value for chunk in column.chunks for value in _values_of(chunk)]


def digests_of(column: pa.ChunkedArray) -> Any:
    """Convert a column of digests to a numpy array with 32 bytes per digest. Raises ValueError for a text that is no
    digest.
    """
    return numpy.concatenate([*map(_digests_of, column.chunks), numpy.empty(0, "S32")])


def _digests_of(chunk: pa.Array) -> Any:
    if not len(chunk):
        return numpy.empty(0, "S32")
    _, offsets, content = chunk.buffers()
    # Arrow stores where each text begins and where the last ends; a slice of an array begins at its offset.
    starts = numpy.frombuffer(offsets, numpy.int32)[chunk.offset :][: len(chunk) + 1]
    digits = numpy.frombuffer(content, numpy.uint8, count=starts[-1] - starts[0], offset=starts[0])
    if chunk.null_count or (numpy.diff(starts) != 32).any() or not _IS_HEX[digits].all():
        raise ValueError("digests that are not 32 hexadecimal digits each")
    return digits.view("S32")


def _values_of(chunk: pa.Array) -> list[Any]:
    if pa.types.is_list(chunk.type):
        items, sizes = _values_of(chunk.flatten()), _values_of(pc.list_value_length(chunk))
        return [tuple(items[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if pa.types.is_string(chunk.type):
        # Each distinct text becomes a Python object once.
        encoded = chunk.dictionary_encode(null_encoding="encode")
        texts = encoded.dictionary.to_pylist()
        return [texts[index] for index in _values_of(encoded.indices)]
    if chunk.null_count:
        raise pa.ArrowInvalid("a column of numbers that has nulls")
    content = chunk.buffers()[1] if len(chunk) else b""
    found: list[Any] = numpy.frombuffer(content, chunk.type.to_pandas_dtype())[chunk.offset :][: len(chunk)].tolist()
    return found


def _numbers(values: Sequence[int], kind: pa.DataType) -> pa.Array:
    content = numpy.array(values, dtype=kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(content)])


def _offsets(sizes: Sequence[int]) -> pa.Buffer:
    offsets = numpy.zeros(len(sizes) + 1, dtype=numpy.int32)
    numpy.cumsum(sizes, out=offsets[1:])
    return pa.py_buffer(offsets)


def _validity(values: Sequence[str | None]) -> pa.Buffer | None:
    if None not in values:
        return None
    return _bits([value is not None for value in values])


def _bits(values: Sequence[bool] | Any) -> pa.Buffer:
    # Arrow stores a bit per value, lowest bit first.
    return pa.py_buffer(numpy.packbits(values, bitorder="little"))
