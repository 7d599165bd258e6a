"""Turns a system's `observe` calls into rows, and keeps the one value that a replay asks for, or all."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from harness.capture.digest import digest, plain
from harness.capture.dtypes import dtype_name
from harness.capture.value import save_value
from harness.capture.values import copy_value
from harness.case import KINDS, Kind
from harness.errors import RecordingError
from harness.records import Key, Record


class Keep(NamedTuple):
    """The tensor whose value a replay must leave behind, and the file to leave it in."""

    key: Key
    path: Path


@dataclass
class Recorder:
    """One rank's rows, in the order computed, and, if wanted, their values. `seconds` is what recording took."""

    rank: int
    keep: Keep | None = None
    keeps_values: bool = False
    step: int = 0
    rows: dict[Key, Record] = field(default_factory=dict)
    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0

    def observe(self, kind: Kind, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor's digest now, before the system goes on to change it.

        Raises RecordingError for a key seen before, an unknown kind, or a loss that is not one number.
        """
        began = time.perf_counter()
        key = Key(self.step, kind, name, self.rank)
        if kind not in KINDS or not name or key in self.rows:
            raise RecordingError(
                f"a system observed {kind} {name!r} twice in step {self.step}, or under no proper name",
                expected=f"each name once a step, of a kind among {', '.join(KINDS)}",
                fix="call observe once for each tensor",
            )
        self.rows[key] = Record(digest(tensor), dtype_name(tensor.dtype), tuple(tensor.shape), _loss(kind, tensor))
        if self.keep is not None and self.keep.key == key:
            save_value(self.keep.path, plain(tensor))
        if self.keeps_values:
            self.values[key] = copy_value(plain(tensor))
        self.seconds += time.perf_counter() - began


def _loss(kind: Kind, tensor: torch.Tensor) -> str | None:
    """A loss as the hexadecimal float that has its very bits."""
    if kind != "loss":
        return None
    if tensor.numel() != 1 or not tensor.is_floating_point():
        raise RecordingError(
            "a loss must be one floating-point number",
            expected="one element of a floating-point dtype",
            found=f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}",
        )
    return float(tensor.item()).hex()
