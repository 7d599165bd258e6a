"""The settings of GPU checks, and the type of a check's answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of GPU checks.

    - `device`: a device type.
    - `shared_gpus`: the number of GPUs if ranks share them, otherwise None.
    - `max_bytes`: the maximum size of a message or tensor.
    """

    device: str = "cuda"
    ranks: int = 8
    shared_gpus: int | None = None
    max_bytes: int = 64 * 2**20

    def device_of(self, rank: int) -> torch.device:
        index = rank % self.shared_gpus if self.shared_gpus else rank
        return torch.device("cpu") if self.device == "cpu" else torch.device(self.device, index)


Answer = tuple[bool, str]
"""(whether a check passed, its findings in words)."""
