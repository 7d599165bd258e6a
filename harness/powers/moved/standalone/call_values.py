"""Converts tensors and arguments of calls to bytes and JSON, and back, without anything that could run code.

An argument is a list `[tag, value]`: `["t", 0]` is the call's first tensor, and `["f", "0x1.8p+1"]` is 3.0.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "bool"),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LAYOUTS = {"strided": torch.strided}
FORMATS = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
ALIGNMENT = 64
"""Addresses are recorded modulo 64 bytes: the alignment of torch's CPU allocator, and the widest vector."""
MAX_DEPTH, MAX_ITEMS, MAX_TEXT = 4, 1 << 14, 200


class RefusedArchiveError(Exception):
    """An archive is damaged, forged, or contains something that is not replayed. The message states the reason."""


def hold(condition: bool, text: str) -> None:
    if not condition:
        raise RefusedArchiveError(text)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided CPU memory of a known dtype.

    Subclasses of Tensor and lazy conjugates or negations are not plain.
    """
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype in NAMES
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def memory_of(tensor: Tensor) -> bytes:
    """Return the bytes of a plain tensor's elements (see `is_plain`), in row-major order."""
    # Row-major, so that a tensor's digest does not depend on its strides.
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size()) if dense.numel() else b""


def short_digest(*parts: bytes) -> str:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(part)
    return made.hexdigest()


def digest_of(value: Any) -> str:
    """Return a digest of a number, or of a tensor's dtype, shape and every byte; "unread" for an unusual tensor.

    Unusual tensors are those that `is_plain` rejects.
    """
    if isinstance(value, Tensor):
        if not is_plain(value):
            return "unread"
        return short_digest(f"{NAMES[value.dtype]}{tuple(value.shape)}".encode(), memory_of(value))
    return short_digest(repr(value).encode())


def leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def encode(value: Any, tensors: list[Tensor]) -> list[Any]:
    """Convert an argument to JSON; its tensors are appended to `tensors`.

    Raises RefusedArchiveError for an unknown type.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        hold(is_plain(value), f"a {kind.__name__} on {value.device.type}, {value.layout}, {value.dtype}")
        tensors.append(value)
        return ["t", len(tensors) - 1]
    if value is None:
        return ["n", 0]
    if kind in (bool, int):
        return ["b" if kind is bool else "i", value]
    if kind is float:
        return ["f", value.hex()]
    if kind is complex:
        return ["c", [value.real.hex(), value.imag.hex()]]
    if kind is str:
        return ["s", value]
    if isinstance(value, (list, tuple)):
        return ["l", [encode(item, tensors) for item in value]]
    if kind is torch.dtype and value in NAMES:
        return ["d", NAMES[value]]
    if kind is torch.device and value.type == "cpu":
        return ["device", "cpu"]
    # Compared by identity: layouts and memory formats are single objects of torch.
    for tag, names in (("layout", LAYOUTS), ("m", FORMATS)):
        for name, each in names.items():
            if value is each:
                return [tag, name]
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return ["g", 0]
    raise RefusedArchiveError(f"an argument of type {kind.__name__}")


def decode(value: Any, tensors: Sequence[Tensor], generator: Any, depth: int = 0) -> Any:
    """Convert an argument from JSON. Raises RefusedArchiveError for anything that `encode` does not write."""
    hold(depth <= MAX_DEPTH and type(value) is list and len(value) == 2 and type(value[0]) is str, "not an argument")
    tag, inner = value
    kinds = {"t": int, "i": int, "b": bool, "f": str, "c": list, "s": str, "l": list, "d": str, "g": int, "n": int}
    # By exact type, as True is an int for isinstance. Tags without a row have a name, such as that of a layout.
    hold(type(inner) is kinds.get(tag, str), f"argument {tag!r:.20} of type {type(inner).__name__}")
    if tag == "t":
        hold(0 <= inner < len(tensors), f"an argument is tensor {inner}, which is not there")
        return tensors[inner]
    if tag == "i":
        hold(-(1 << 63) <= inner < 1 << 63, "an integer of more than 64 bits")
        return inner
    if tag == "n":
        return None
    if tag == "b":
        return inner
    if tag == "f":
        return _number(inner)
    if tag == "c":
        hold(len(inner) == 2 and all(type(part) is str for part in inner), "not a complex number")
        return complex(_number(inner[0]), _number(inner[1]))
    if tag == "s":
        hold(len(inner) <= MAX_TEXT, "a long text")
        return inner
    if tag == "l":
        hold(len(inner) <= MAX_ITEMS, "a long list")
        return [decode(item, tensors, generator, depth + 1) for item in inner]
    if tag == "g":
        hold(generator is not None, "a generator without its state")
        return generator
    names: dict[str, dict[str, Any]] = {
        "d": DTYPES,
        "layout": LAYOUTS,
        "m": FORMATS,
        "device": {"cpu": torch.device("cpu")},
    }
    hold(tag in names and inner in names[tag], f"unknown argument {tag!r:.20} {inner!r:.40}")
    return names[tag][inner]


def _number(text: str) -> float:
    hold(len(text) <= 40, "not a number")
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError) as error:
        raise RefusedArchiveError("not a number") from error


def span(tensor: Tensor) -> tuple[int, int]:
    """Return (byte offset of a tensor's first element in its storage, byte offset of the end of its last element)."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    return first, first + reach(tensor.shape, tensor.stride()) * size


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements of memory that a strided tensor spans."""
    if 0 in shape:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=False))


def memory(content: bytes, alignment: int) -> Tensor:
    """Return a tensor of bytes with this content, in new memory whose address modulo 64 is `alignment`."""
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    buffer = bytearray(len(content) + ALIGNMENT)
    # The buffer is a whole alignment longer than the content, so the content can start at any address modulo 64.
    address = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
    first = (alignment - address) % ALIGNMENT
    buffer[first : first + len(content)] = content
    return torch.frombuffer(buffer, dtype=torch.uint8, count=len(content), offset=first)


def strided(base: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor with this layout in the memory of `base`, a tensor of bytes. `offset` is in bytes.

    Raises RefusedArchiveError if the tensor would extend beyond this memory.
    """
    size = dtype.itemsize
    hold(offset >= 0 and offset % size == 0 and all(count >= 0 for count in shape), "a tensor has no such place")
    hold(len(shape) == len(stride) and all(step >= 0 for step in stride), "strides do not fit a shape")
    hold(offset + reach(shape, stride) * size <= base.numel(), "a tensor reaches outside of its memory")
    return torch.empty(0, dtype=dtype, device=base.device).set_(
        base.untyped_storage(), offset // size, tuple(shape), tuple(stride)
    )


# Inputs above the budget are drawn again. Integer arithmetic and single products and sums in float64 give the same
# values on every machine and with every torch, unlike `torch.randn`.


def measured(tensor: Tensor) -> dict[str, Any]:
    """Return the distribution of a tensor's elements, from which `drawn` draws similar values.

    This is {"mean", "deviation"} of the finite numbers, or {"low", "high"} of integers.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        finite = parts.detach().double()
        # A mean with an infinity or a NaN describes nothing.
        finite = finite[finite.isfinite()]
        mean = float(finite.mean()) if finite.numel() else 0.0
        deviation = float(finite.std()) if finite.numel() > 1 else 0.0
        return {"mean": mean, "deviation": deviation}
    low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
    return {"low": low, "high": high}


def drawn(dtype: torch.dtype, count: int, seed: int, distribution: dict[str, Any]) -> bytes:
    """Return the bytes of `count` random values with a distribution from `measured`.

    They are the same on every machine.
    """
    if "mean" in distribution:
        mean, deviation = distribution["mean"], distribution["deviation"]
        hold(math.isfinite(mean) and math.isfinite(deviation), "not a distribution")
        width = 2 if dtype.is_complex else 1
        sums = torch.zeros(count * width, dtype=torch.float64)
        for part in range(4):  # a sum of four uniform numbers has nearly the shape of a normal one
            sums += (_bits(count * width, 4 * seed + part) >> 40).double()
        # A sum of four numbers in [0, 1) has mean 2 and variance 1/3.
        values = (sums * 2.0**-24 - 2.0) * (deviation * 3.0**0.5) + mean
        return memory_of(values.view(torch.complex128).to(dtype) if dtype.is_complex else values.to(dtype))
    low, high = distribution["low"], distribution["high"]
    hold(-(1 << 62) < low <= high < 1 << 62, "not a distribution")
    return memory_of(((_bits(count, seed) >> 1) % (high - low + 1) + low).to(dtype))


def _bits(count: int, seed: int) -> Tensor:
    # splitmix64, a multiplicative hash of the index and the seed.
    mixed = torch.arange(count, dtype=torch.int64) + (seed * 1_000_003 + 1)
    for factor in (-4658895280553007687, -7723592293110705685):
        mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * factor
    return (mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF


def joined(parts: Iterable[str]) -> str:
    return short_digest("|".join(parts).encode())
