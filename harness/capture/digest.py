"""Compute a tensor's digest: 128 bits over dtype, shape and every byte in order, the same on every device.

Two tensors have the same digest if they agree in dtype, in shape and in every element's bits. A permutation of
elements, the sign of a zero or the payload of a NaN changes the digest. Strides do not matter. xxh3 is no cryptographic
hash: it detects defects, not deliberate collisions.

    header   "float32[3,4]"
    content  up to 16 KiB: the row-major bytes; above: the XXH3-128 of each block of 16 KiB, and of the remaining bytes
    digest   XXH3-128 of header and content

A block of 16 KiB is called a leaf. A GPU hashes all leaves of a tensor in parallel (`leaves.py`), and copies only 16
bytes per leaf to host memory. On a CPU, xxhash computes the same digest.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy
import torch
import xxhash

from bitproof.harness.capture.dtypes import dtype_name
from bitproof.harness.capture.leaves import hash_on_device
from bitproof.harness.capture.xxh3 import LEAF_BYTES
from bitproof.harness.errors import RecordingError

ALGORITHM = "xxh3-128-tree-16KiB"
"""The name of this algorithm in a manifest. Digests of different algorithms cannot be compared."""

_INFINITY = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}
"""By dtype, the bits of infinity as an integer. Without the sign bit, a NaN is a larger integer, a finite number a
smaller one.
"""

_IS_LITTLE = sys.byteorder == "little"
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> str:
    """Return a tensor's digest, as 32 hexadecimal digits. For a DTensor, return the digest of its local shard.

    Raises RecordingError for a tensor without dense storage of its own: sparse, nested, quantized, fake or freed.
    """
    return _digest(plain(tensor))[0]


def digest_and_constant(tensor: torch.Tensor) -> tuple[str, str | None]:
    """Return a pair: a tensor's digest, and a name for its content: "zero", "nan", "inf", or None for any other
    content.

    - "zero": all elements are zero of either sign.
    - "nan": all elements are NaN.
    - "inf": no element is finite, and some are infinite.

    Raises the errors of `digest`.
    """
    tensor = plain(tensor)
    found, content = _digest(tensor)
    if content is None:
        # On a GPU read the first element only: it nearly always rules out a constant.
        content = _octets_at(tensor.as_strided((1,), (1,)))
        if _may_be_constant(content, tensor.dtype):
            content = _octets_at(tensor)
    return found, _constant(content, tensor.dtype) if _may_be_constant(content, tensor.dtype) else None


def _digest(tensor: torch.Tensor) -> tuple[str, ctypes.Array[Any] | None]:
    """Return a pair: the digest of a dense local tensor, and its bytes (None if they are only on a GPU)."""
    header, num_bytes = _header(tensor.dtype, tensor.shape), tensor.nbytes
    if num_bytes <= LEAF_BYTES:  # copying so few bytes takes less time than feeding a hasher twice
        content = _octets_at(tensor)
        return xxhash.xxh3_128_hexdigest(header + content), content
    if tensor.is_cuda:
        # Only the leaves' digests are copied to the host, 16 bytes for each 16 KiB.
        whole = xxhash.xxh3_128(header)
        whole.update(hash_on_device(octets(tensor)))
        return whole.hexdigest(), None
    content = _octets_at(tensor)
    return xxhash.xxh3_128_hexdigest(header + _leaves(memoryview(content))), content


@functools.lru_cache(maxsize=4096)
def _header(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype_name(dtype)}[{','.join(map(str, shape))}]".encode()


def _leaves(view: memoryview) -> bytes:
    starts = range(0, len(view), LEAF_BYTES)
    return b"".join([xxhash.xxh3_128_digest(view[start : start + LEAF_BYTES]) for start in starts])


def _may_be_constant(content: ctypes.Array[Any], dtype: torch.dtype) -> bool:
    # A tensor whose first element is neither zero nor infinite nor NaN needs no further look.
    if not content:
        return False
    # The element's highest byte is nearly always enough: it has the sign and seven bits of the exponent, which are all
    # ones if the element is not finite.
    infinity, size = _INFINITY.get(dtype), dtype.itemsize
    if infinity is not None and _IS_LITTLE and 0 < content[size - 1] & 0x7F < infinity >> (8 * size - 8):
        return False
    first = int.from_bytes(content[:size], sys.byteorder)
    if infinity is None:
        return first == 0
    magnitude = first & ((1 << (8 * size - 1)) - 1)
    return magnitude == 0 or magnitude >= infinity


def _constant(content: ctypes.Array[Any], dtype: torch.dtype) -> str | None:
    # Dtypes without infinity, such as integers, are zero if all bytes are.
    infinity, octets_of_all = _INFINITY.get(dtype), memoryview(content)
    if infinity is None:
        return None if numpy.frombuffer(octets_of_all, numpy.uint8).any() else "zero"
    magnitudes = numpy.frombuffer(octets_of_all, f"u{dtype.itemsize}") & ((1 << (8 * dtype.itemsize - 1)) - 1)
    if not magnitudes.any():
        return "zero"
    # A NaN is larger than infinity, so the least magnitude decides.
    least = magnitudes.min()
    return "nan" if least > infinity else "inf" if least == infinity else None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the dense local tensor inside `tensor`, detached from autograd. Raises RecordingError if there is none."""
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor:
            tensor = _unwrap(tensor)
    if tensor.layout is not torch.strided:
        raise _no_bytes(f"a tensor of layout {tensor.layout}")
    if tensor.is_nested or tensor.is_quantized:
        raise _no_bytes("a nested tensor" if tensor.is_nested else f"a quantized tensor of dtype {tensor.dtype}")
    if tensor.data_ptr() == 0 and tensor.numel():  # reading freed storage would end the process
        raise _no_bytes("a meta tensor" if tensor.is_meta else "a tensor without memory, such as a freed one")
    return tensor


FLAT = "_bitproof_flat"
"""The name of the attribute that marks a tensor as a part of a flattened tensor.

Its value is a triple: the shape of the whole tensor, the index of the part's first element in the flattened tensor, and
the index after its last element.
"""


def placements(tensor: torch.Tensor) -> str | None:
    """Describe how a distributed tensor is divided over ranks; None for a tensor that is whole.

    - A DTensor: `Shard(dim=0) of [8, 4] over [2]`, with the shapes of the whole tensor and of the mesh.
    - A part of a flattened tensor: `flat of [8, 4]`.
    """
    if (part := getattr(tensor, FLAT, None)) is not None:
        return f"flat of {list(part[0])}"
    if type(tensor) is torch.Tensor or not hasattr(tensor, "to_local"):
        return None
    placed: Any = tensor
    text = ", ".join(map(repr, placed.placements))
    return f"{text} of {list(placed.shape)} over {list(placed.device_mesh.shape)}"


def _unwrap(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "wait") and hasattr(tensor, "elem"):  # a functional collective before its wait
        tensor = tensor.wait()
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # such as a FakeTensor
        raise _no_bytes(f"a {type(tensor).__name__}")
    return tensor


def _no_bytes(found: str) -> RecordingError:
    return RecordingError(
        "a tensor without bytes of its own has no digest",
        expected="a dense tensor with memory",
        found=found,
        fix="observe its values as a dense tensor, such as x.to_dense(), x.dequantize() or each part",
    )


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements in row-major order, as a uint8 tensor [bytes] on the same device.

    It is a view if the tensor is contiguous.
    """
    dense = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
    if not dense.is_contiguous():
        dense = dense.view(_SAME_SIZE.get(dense.itemsize, dense.dtype)).contiguous()  # torch cannot copy float4
    row = dense.as_strided((dense.numel(),), (1,))  # a dim of size 1 may have any stride, even in a contiguous tensor
    return row.view(torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in row-major order. They are not copied if the tensor is contiguous in
    host memory.

    Raises RecordingError for a tensor that has elements but no memory of its own.
    """
    content = _octets_at(tensor)
    return memoryview(content).cast("B") if len(content) else memoryview(b"")


def _octets_at(tensor: torch.Tensor) -> ctypes.Array[Any]:
    num_bytes = tensor.nbytes
    if num_bytes == 0:
        return _NOTHING
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        tensor = octets(tensor).cpu()
    if tensor.data_ptr() == 0:  # reading at address 0 would end the process
        raise _no_bytes(f"a {type(tensor).__name__} without memory of its own")
    # Not .numpy(): it forbids resizing the storage from then on, and FSDP frees gathered parameters by resizing.
    # Nor dlpack: it takes 12 us per tensor, more than hashing most of them, and this takes 1 us.
    content = _array_type(num_bytes).from_address(tensor.data_ptr())
    content.owner = tensor  # the owner of this memory, kept alive while it is read
    return content


@functools.lru_cache(maxsize=1024)
def _array_type(num_bytes: int) -> Any:
    return ctypes.c_ubyte * num_bytes


_NOTHING = _array_type(0)()
