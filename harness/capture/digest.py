"""A tensor's digest: 128 bits over dtype, shape and every byte in order.

Two tensors share a digest exactly when they agree in dtype, in shape and in every element's bits,
whatever their strides. So a permutation, the sign of a zero or the payload of a NaN shows.
xxh3 is no cryptographic hash: it guards against defects, not against somebody who builds collisions.
"""

from __future__ import annotations

import numpy
import torch
import xxhash

from harness.capture.dtypes import dtype_name


def digest(tensor: torch.Tensor) -> str:
    """32 hexadecimal digits. A DTensor counts as its local shard. Raises TypeError for a sparse tensor."""
    tensor = plain(tensor)
    shape = ",".join(map(str, tensor.shape))
    hasher = xxhash.xxh3_128(f"{dtype_name(tensor.dtype)}[{shape}]".encode())
    hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The dense local tensor behind `tensor`, apart from autograd; raises TypeError when there is none."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "wait") and hasattr(tensor, "elem"):  # a functional collective that was not waited for
        tensor = tensor.wait()
    if tensor.layout is not torch.strided:
        raise TypeError(f"a digest needs a dense tensor, not one of layout {tensor.layout}")
    return tensor


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements' bytes in row-major order, without a copy where they already lie so in host memory."""
    if tensor.numel() == 0:
        return memoryview(b"")
    dense = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    row = dense.as_strided((dense.numel(),), (1,))  # a dim of size 1 may keep any stride, even when contiguous
    # Not .numpy(): it forbids the storage to be resized ever after, and FSDP frees gathered parameters that way.
    return memoryview(numpy.from_dlpack(row.view(torch.uint8))).cast("B")  # type: ignore[arg-type]
