"""The norm of all gradients; against a whole model's in `parallel/test_tensor.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitproof.harness.case import Parallelism
from bitproof.reference.gradient_norm import gradient_norm
from bitproof.reference.parallel.fsdp import Sharding
from bitproof.reference.parallel.mesh import Mesh
from tests.ranks import on_ranks

OWN = Sharding("fsdp", 1, (0, 0, 1), 1, torch.float32, torch.float32)
BOTH = replace(OWN, copies=2)


@pytest.mark.ranks
def test_what_each_rank_holds_counts_on_each_and_what_tensor_ranks_hold_twice_counts_once() -> None:
    def body(mesh: Mesh) -> list[float]:
        split, whole = torch.tensor([3.0, 0.0]) * (1 - mesh.rank), torch.tensor([4.0])
        found = gradient_norm({"split": split, "whole": whole}, {"split": OWN, "whole": BOTH}, mesh)
        counted_twice = gradient_norm({"split": split, "whole": whole}, {"split": OWN, "whole": OWN}, mesh)
        assert found.shape == () and found.dtype == torch.float32
        return [found.item(), counted_twice.item()]

    assert on_ranks(Parallelism(world_size=2, ep=1, tp=2), body) == [[5.0, pytest.approx(41.0**0.5)]] * 2
