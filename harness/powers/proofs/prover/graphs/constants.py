"""Digests of tensors that are constants of a graph."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from bitproof.harness.torch_compat import disable_current_modes as without_modes


def digest_of(x: Tensor) -> str:
    """Return the SHA-256 of a tensor's elements in row-major order. Dtype and shape are not included."""
    with without_modes():
        content = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()
