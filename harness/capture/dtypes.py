"""Define the names of dtypes in digests and on disk, and map these names to dtypes."""

from __future__ import annotations

import functools

import torch


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
