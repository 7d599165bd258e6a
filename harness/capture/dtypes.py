"""The names that dtypes have in digests and on disk, and back."""

from __future__ import annotations

import functools

import torch


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16, and so on."""
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
