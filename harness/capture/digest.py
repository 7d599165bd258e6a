"""A tensor's digest: 128 bits over dtype, shape and every byte in order, the same on every device.

Two tensors share a digest exactly when they agree in dtype, in shape and in every element's bits,
whatever their strides. So a permutation, the sign of a zero or the payload of a NaN shows.
xxh3 is no cryptographic hash: it guards against defects, not against somebody who builds collisions.

    header   "float32[3,4]"
    content  the row-major bytes; of more than 16 KiB, instead: for each 16 KiB in order, and what is left
             over, its XXH3-128
    digest   XXH3-128 of header and content

So a GPU can hash all of a tensor's leaves at once where they lie (`leaves.py`), and hands 16 bytes of each to
the host, and a host with no code but xxhash comes to the same.
"""

from __future__ import annotations

import numpy
import torch
import xxhash

from harness.capture.dtypes import dtype_name
from harness.capture.leaves import hash_on_device
from harness.capture.xxh3 import LEAF_BYTES
from harness.errors import RecordingError

ALGORITHM = "xxh3-128-tree-16KiB"
"""What a manifest says of its digests. Those of another name cannot be compared with them."""

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> str:
    """32 hexadecimal digits. A DTensor counts as its local shard.

    Raises RecordingError for a tensor without bytes of its own: sparse, nested, quantized, fake or freed.
    """
    tensor = plain(tensor)
    shape = ",".join(map(str, tensor.shape))
    hasher = xxhash.xxh3_128(f"{dtype_name(tensor.dtype)}[{shape}]".encode())
    hasher.update(_content(tensor))
    return hasher.hexdigest()


def _content(tensor: torch.Tensor) -> memoryview | bytes:
    if tensor.nbytes <= LEAF_BYTES:
        return tensor_bytes(tensor)
    if tensor.is_cuda:
        return hash_on_device(octets(tensor))
    view = tensor_bytes(tensor)
    starts = range(0, len(view), LEAF_BYTES)
    return b"".join([xxhash.xxh3_128_digest(view[start : start + LEAF_BYTES]) for start in starts])


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The dense local tensor behind `tensor`, apart from autograd; raises RecordingError when there is none."""
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = _unwrap(tensor)
    if tensor.layout is not torch.strided:
        raise _no_bytes(f"a tensor of layout {tensor.layout}")
    if tensor.is_nested or tensor.is_quantized:
        raise _no_bytes("a nested tensor" if tensor.is_nested else f"a quantized tensor of dtype {tensor.dtype}")
    if tensor.data_ptr() == 0 and tensor.numel():  # reading one whose storage was freed would end the process
        raise _no_bytes("a meta tensor" if tensor.is_meta else "a tensor without memory, such as a freed one")
    return tensor


def _unwrap(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "wait") and hasattr(tensor, "elem"):  # a functional collective that was not waited for
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
    """The elements' bytes in row-major order, uint8 [bytes], on its device, without a copy where they lie so."""
    dense = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
    if not dense.is_contiguous():
        dense = dense.view(_SAME_SIZE.get(dense.itemsize, dense.dtype)).contiguous()  # torch copies no float4
    row = dense.as_strided((dense.numel(),), (1,))  # a dim of size 1 may keep any stride, even when contiguous
    return row.view(torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements' bytes in row-major order, without a copy where they already lie so in host memory."""
    if tensor.numel() == 0:
        return memoryview(b"")
    row = octets(tensor)
    # Not .numpy(): it forbids the storage to be resized ever after, and FSDP frees gathered parameters that way.
    return memoryview(numpy.from_dlpack(row if row.is_cpu else row.cpu()))  # type: ignore[arg-type]
