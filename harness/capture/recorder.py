"""Turn a system's `observe` calls into rows of a recording, and keep copies of the selected values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from bitproof.harness.capture.boxes import box_of, digests_of_cells
from bitproof.harness.capture.digest import digest_and_constant, placements, plain
from bitproof.harness.capture.dtypes import dtype_name
from bitproof.harness.capture.selection import chooser
from bitproof.harness.capture.values import copy_value
from bitproof.harness.case import KINDS, Kind
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Key, Record
from bitproof.harness.records.layout import Box, Cuts


@dataclass
class Recorder:
    """Records a rank's tensors, as rows in order.

    - `keep`: the key of a tensor to copy into `kept`.
    - `patterns`: which tensors to copy into `values`.
    - `seconds`: the time that recording has taken.
    - `cuts`: by `kind/name`, the cuts that divide a tensor into cells, whose digests are recorded, too.
    """

    rank: int
    keep: Key | None = None
    patterns: tuple[str, ...] = ()
    kept: torch.Tensor | None = None
    step: int = 0
    rows: dict[Key, Record] = field(default_factory=dict)
    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    cuts: Mapping[str, Cuts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._is_chosen = chooser(self.patterns) if self.patterns else None

    def observe(self, kind: Kind, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor. Its digest is computed at once, so the system may change it afterwards.

        Raises RecordingError for an unknown kind, a loss that is no single number, or a name shown twice in a step.
        """
        began = time.perf_counter()
        key = Key(self.step, kind, name, self.rank)
        if kind not in KINDS or not name or key in self.rows:
            raise RecordingError(
                f"a system observed {kind} {name!r} twice in step {self.step}, or under no proper name",
                expected=f"each name once a step, of a kind among {', '.join(KINDS)}",
                fix="call observe once for each tensor",
            )
        part = plain(tensor)
        digest, constant = digest_and_constant(part)
        # In the order of Record's fields after the digest.
        facts = (dtype_name(part.dtype), tuple(part.shape), _loss(kind, part), constant, placements(tensor))
        # Only DTensors and parts of flattened tensors have placements, and so a box.
        box = box_of(tensor) if facts[-1] else None
        self.rows[key] = Record(
            digest, *facts, str(box) if box else None, self._cells(f"{kind}/{name}", facts[-1], part, box)
        )
        if self.keep is not None and self.keep == key:
            self.kept = copy_value(part)
        if self._is_chosen is not None and self._is_chosen(key):
            self.values[key] = copy_value(part)
        self.seconds += time.perf_counter() - began

    def _cells(self, tensor: str, placed: str | None, part: torch.Tensor, box: Box | None) -> str | None:
        cuts = self.cuts.get(tensor)
        # A shard without a box has no known position, so its cells are unknown, too.
        if cuts is None or (placed and box is None):
            return None
        return digests_of_cells(part, box or Box.whole(part.shape), cuts)


def _loss(kind: Kind, tensor: torch.Tensor) -> str | None:
    """Return a loss as a hexadecimal float, which has its exact value; None for tensors of other kinds."""
    if kind != "loss":
        return None
    if tensor.numel() != 1 or not tensor.is_floating_point():
        raise RecordingError(
            "a loss must be one floating-point number",
            expected="one element of a floating-point dtype",
            found=f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}",
        )
    return float(tensor.item()).hex()
