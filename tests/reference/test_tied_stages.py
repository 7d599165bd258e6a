from __future__ import annotations

import pytest
import torch

from bitproof.harness.case import Parallelism
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.tied_stages import EMBEDDINGS, PROJECTION, JoinTied
from tests.ranks import on_ranks

# float32 has no 1 beside 1e8: the order of the sum shows.
FIRST, LAST = torch.tensor([1e8, 0.1]), torch.tensor([1.0, 0.2])


def test_a_rank_with_both_copies_adds_their_gradients_and_leaves_others():
    other = torch.ones(1)
    joined = JoinTied(Mesh(0, Parallelism(ep=1)), False)({PROJECTION: LAST, "norm.weight": other, EMBEDDINGS: FIRST})
    assert joined["norm.weight"] is other
    assert all(torch.equal(joined[name], FIRST + LAST) for name in (EMBEDDINGS, PROJECTION))


@pytest.mark.ranks
def test_the_first_stage_and_the_last_get_the_sum_of_both_and_those_between_nothing():
    def body(mesh):
        own = ({EMBEDDINGS: FIRST}, {"norm.weight": FIRST}, {PROJECTION: LAST})[mesh.coordinate("pp")]
        return {name: x.tolist() for name, x in JoinTied(mesh, True)(own).items()}

    total = (FIRST + LAST).tolist()
    expected = [{EMBEDDINGS: total}, {"norm.weight": FIRST.tolist()}, {PROJECTION: total}]
    assert on_ranks(Parallelism(world_size=3, ep=1, pp=3), body) == expected
