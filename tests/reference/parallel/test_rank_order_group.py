import pytest
import torch

from bitproof.harness.case import Parallelism
from bitproof.harness.torch_distributed import register_group, unregister_group
from bitproof.reference.parallel import collectives
from bitproof.reference.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from bitproof.reference.parallel.mesh import EXPERT, FSDP
from bitproof.reference.parallel.rank_order_group import LoneGroup
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

FOUR = Parallelism(world_size=4, ep=2)

# 1e8 + 1 is 1e8 in float32, so a sum of these depends on its order.
ORDERED = torch.tensor([1e8, 1.0, -1e8, 1.0])
EITHER = pytest.mark.parametrize("collectives", ["gloo", "shared"])


@EITHER
def test_a_reduce_scatter_sums_in_ascending_rank_order(collectives):
    def body(mesh):
        return reduce_scatter(ORDERED[mesh.rank].repeat(4), 4, FSDP).tolist()

    in_rank_order = ((ORDERED[0] + ORDERED[1]) + ORDERED[2]) + ORDERED[3]
    in_reverse = ((ORDERED[3] + ORDERED[2]) + ORDERED[1]) + ORDERED[0]
    assert in_rank_order != in_reverse, "this input must tell the orders apart"
    assert on_ranks(FOUR, body, collectives=collectives) == [[in_rank_order.item()]] * 4


@EITHER
def test_an_all_reduce_sums_in_ascending_rank_order(collectives):
    def body(mesh):
        return all_reduce(ORDERED[mesh.rank].repeat(3), FSDP).tolist()

    expected = (((ORDERED[0] + ORDERED[1]) + ORDERED[2]) + ORDERED[3]).item()
    assert on_ranks(FOUR, body, collectives=collectives) == [[expected] * 3] * 4


@EITHER
def test_an_all_gather_concatenates_in_rank_order(collectives):
    def body(mesh):
        return all_gather(torch.full((2, 3), float(mesh.rank), dtype=torch.bfloat16), 4, FSDP).float().tolist()

    expected = torch.arange(4.0).repeat_interleave(2).unsqueeze(1).expand(8, 3).tolist()
    assert on_ranks(FOUR, body, collectives=collectives) == [expected] * 4


@EITHER
def test_an_uneven_all_to_all_within_a_subgroup_moves_each_row_to_its_rank(collectives):
    def body(mesh):
        sent = [1, 2] if mesh.coordinate(EXPERT) == 0 else [3, 0]
        received = [1, 3] if mesh.coordinate(EXPERT) == 0 else [2, 0]
        rows = torch.arange(3.0) + 10 * mesh.rank
        return all_to_all(rows, received, sent, EXPERT).tolist()

    assert on_ranks(FOUR, body, collectives=collectives) == [[0, 10, 11, 12], [1, 2], [20, 30, 31, 32], [21, 22]]


@EITHER
def test_a_reduction_that_is_no_sum_is_refused(collectives):
    def body(mesh):
        with pytest.raises(ValueError, match=r"a rank-order group takes sums only, not .*MAX"):
            torch.ops._c10d_functional.all_reduce(torch.ones(2), "max", FSDP)
        return True

    assert on_ranks(FOUR, body, collectives=collectives) == [True] * 4


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_rank_alone_gets_what_it_sends_in_memory_of_its_own(monkeypatch, is_watched):
    group = LoneGroup()
    register_group("alone", group)
    monkeypatch.setattr(collectives, "is_watched", lambda: is_watched)  # where somebody watches, operators are called
    try:
        x = torch.arange(6.0).view(3, 2)
        x[0, 0] = -0.0
        results = [all_gather(x, 1, "alone"), reduce_scatter(x, 1, "alone"), all_reduce(x, "alone")]
        results.append(all_to_all(x, [3], [3], "alone"))
        x_bits = x.view(torch.int32).clone()
        assert all(torch.equal(result.view(torch.int32), x_bits) for result in results)
        x.zero_()
        assert all(torch.equal(result.view(torch.int32), x_bits) for result in results)
    finally:
        unregister_group("alone")
