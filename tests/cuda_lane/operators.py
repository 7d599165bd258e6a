"""What a CUDA build of torch would trace, where a build for the CPU with a stand-in for CUDA would not.

1. A CUDA build has kernels of its own for some operators that the CPU build can only decompose there.
2. Attention on CUDA is one of CUDA's own operators. The choice is that of torch 2.13 on compute capability 8.0 and
   later under strict determinism, which leaves cuDNN out (`sdp_utils.cpp`): flash for half precision where queries and
   values have one head dim, padded to a multiple of 8, else efficient.
3. The current device, which torch.cuda asks of a library that is not there.

Import this after torch knows of the stand-in; `install` changes torch for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

_HALF = (torch.bfloat16, torch.float16)
_FLASH_MULTIPLE = 8

_remembered: dict[int, dict[Any, Any]] = {}

_plain_attention = functional.scaled_dot_product_attention
_registrations = torch.library.Library("aten", "IMPL", "CUDA")


def install() -> None:
    """Let this process trace for CUDA as a CUDA build would."""
    functional.scaled_dot_product_attention = attention
    for name in undecomposed():
        _registrations.impl(name, _has_no_kernel)


def undecomposed() -> list[str]:
    """The operators that have a kernel on every device, and are decomposed where a build lacks the device's."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [
        name.removeprefix("aten::")
        for name in names
        if has(name, "CompositeImplicitAutograd") and has(name, "CPU") and not has(name, "CUDA")
    ]


def _has_no_kernel(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the stand-in for CUDA has no kernels")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, on CUDA as the operator that torch would choose there."""
    if query.device.type != "cuda":
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    assert attn_mask is None and not enable_gqa, "the choice for masks and shared heads is not told here"
    dim = query.shape[-1]
    if query.dtype not in _HALF or dim != value.shape[-1]:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, None, True, dropout_p, is_causal, scale=scale)[0]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    if missing := -dim % _FLASH_MULTIPLE:
        query, key, value = (functional.pad(x, [0, missing]) for x in (query, key, value))
    return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0][..., :dim]


@contextmanager
def current_device(index: int) -> Iterator[torch.device]:
    """cuda:`index` as the device that a rank has set: `torch.device("cuda")` means it.

    What torch remembers of fake calls has the device that was current then, so each device has a memory of its own; no
    rank ever changes its device.
    """
    with (
        mock.patch.object(FakeTensorMode, "cache", _remembered.setdefault(index, {})),
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda, "current_device", lambda: index),
    ):
        yield torch.device("cuda", index)
