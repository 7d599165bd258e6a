"""Find the part of a DTensor that a rank has (its box), and digest this part in blocks (cells).

- A box has the part's ranges of indices in each dim of the whole tensor. torch's own code computes them from the
  placements, so uneven, empty and interleaved shards are correct.
- Cells divide the whole tensor: cuts divide each dim into ranges, and a cell has one range of each dim. For example, a
  cut in the middle of both dims of a matrix makes four cells.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from bitproof.harness.capture.digest import FLAT, digest
from bitproof.harness.records.layout import MAX_TEXT, Box, Cuts, Run
from bitproof.harness.torch_distributed import parts_of


def box_of(tensor: torch.Tensor) -> Box | None:
    """Return the part of a DTensor or of a flattened tensor that this rank has, as ranges of indices.

    Return None for any other tensor, for a partial sum, and if the local tensor does not fit its placements.
    """
    # The mark has the whole shape, and the indices of the part's first element and after its last.
    if (part := getattr(tensor, FLAT, None)) is not None:
        return Box(part[0], ((part[1:],),), is_flat=True) if part[2] - part[1] == tensor.numel() else None
    if type(tensor) is torch.Tensor or not hasattr(tensor, "to_local"):
        return None
    placed: Any = tensor
    coordinate = placed.device_mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in placed.placements):
        return None
    box = _box(tuple(placed.shape), tuple(placed.placements), tuple(placed.device_mesh.shape), tuple(coordinate))
    # Interleaved shards may have more runs than a record has room for.
    fits = box.local_shape == tuple(placed.to_local().shape) and len(str(box)) <= MAX_TEXT
    return box if fits else None


def digests_of_cells(part: torch.Tensor, box: Box, cuts: Cuts) -> str | None:
    """Return the digests of the cells into which `cuts` divide a rank's part, joined into a single text.

    Return None if the part has another shape than its box, or if the cuts are for another number of dims.
    """
    cut = box.cut_by(cuts)
    if tuple(part.shape) != box.local_shape or cut is None:
        return None
    box, part = cut, part if not cut.is_flat else part.reshape(-1)
    return "".join(digest(part[box.slices(cell)]) for cell in box.cells(cuts))


@functools.lru_cache(maxsize=4096)
def _box(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> Box:
    indices = [torch.arange(size) for size in shape]
    for placement, ranks, here in zip(placements, mesh, coordinate, strict=True):
        if placement.is_replicate():
            continue
        # Each axis of the mesh divides the indices that the axes before it left to this rank.
        dim = placement.dim % len(shape)
        indices[dim] = parts_of(placement, indices[dim], ranks)[here]
    return Box(shape, tuple(_runs(row.tolist()) for row in indices))


def _runs(indices: list[int]) -> tuple[Run, ...]:
    found: list[list[int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1][1] += 1
        else:
            found.append([index, index + 1])
    # A rank with an empty shard has an empty run.
    return tuple((first, end) for first, end in found) or ((0, 0),)
