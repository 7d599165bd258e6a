import pytest
import torch
import torch.distributed as dist

from bitproof.harness.case import Parallelism
from bitproof.harness.disturb.faults import SUM_ORDERS
from bitproof.harness.torch_distributed import register_group
from bitproof.reference.parallel.collectives import all_gather, all_reduce, reduce_scatter
from bitproof.reference.parallel.mesh import FSDP
from bitproof.reference.parallel.other_order_group import FEWEST_RANKS, ORDERS, OtherOrderGroup, sum_in_order
from bitproof.reference.parallel.rank_order_group import sum_in_rank_order
from tests.ranks import on_ranks

FOUR = Parallelism(world_size=4, ep=2)
OWN = "other_order"


def test_faults_name_the_orders_that_there_are():
    assert SUM_ORDERS == ORDERS


def test_each_order_is_the_one_that_it_says():
    r0, r1, r2, r3 = parts = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)) * torch.tensor(1e3) ** 2
    assert torch.equal(sum_in_order(parts, "descending"), ((r3 + r2) + r1) + r0)
    assert torch.equal(sum_in_order(parts, "pairwise"), (r0 + r1) + (r2 + r3))
    by_position = [((r0 + r1) + r2) + r3, ((r1 + r2) + r3) + r0, ((r2 + r3) + r0) + r1, ((r3 + r0) + r1) + r2]
    expected = torch.cat([whole[2 * block : 2 * block + 2] for block, whole in enumerate(by_position)])
    assert torch.equal(sum_in_order(parts, "position"), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_every_part_is_added_once_whatever_the_order(order, ranks):
    parts = (2.0 ** torch.arange(ranks)).unsqueeze(1).expand(ranks, 5)
    assert torch.equal(sum_in_order(parts, order), torch.full((5,), 2.0**ranks - 1))


@pytest.mark.parametrize("order", ORDERS)
def test_of_fewer_ranks_than_an_order_needs_it_is_the_ascending_one(order):
    def is_ascending(ranks):
        parts = torch.randn(ranks, 4096, generator=torch.Generator().manual_seed(ranks))
        return torch.equal(sum_in_order(parts, order), sum_in_rank_order(parts))

    assert is_ascending(FEWEST_RANKS[order] - 1) and not is_ascending(FEWEST_RANKS[order])


def test_an_order_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no order of sums: random"):
        sum_in_order(torch.ones(2, 1), "random")


@pytest.mark.ranks
def test_sums_of_floats_are_in_the_other_order_while_it_is_on_and_what_moves_bits_moves_the_same():
    def body(mesh):
        lines, on = [], [True]
        group = OtherOrderGroup(dist.group.WORLD, "descending", lambda: on[0], lambda: lines.append(2))
        register_group(OWN, group)
        values = torch.randn(4 * 50, generator=torch.Generator().manual_seed(mesh.rank))
        other = [reduce_scatter(values, 4, OWN), all_reduce(values, OWN)]
        plain = [reduce_scatter(values, 4, FSDP), all_reduce(values, FSDP)]
        differ = [not torch.equal(*pair) for pair in zip(other, plain, strict=True)]
        gathered = all_gather(values, 4, FSDP)
        exact = torch.equal(plain[1], sum_in_rank_order(gathered.view(4, -1)))
        reverse = torch.equal(other[1], sum_in_rank_order(gathered.view(4, -1).flip(0)))
        counts = all_reduce(torch.arange(4), OWN).tolist()
        on[0] = False
        off = torch.equal(all_reduce(values, OWN), plain[1])
        return [differ, exact, reverse, counts, off, lines.count(2), torch.equal(all_gather(values, 4, OWN), gathered)]

    assert on_ranks(FOUR, body) == [[[True, True], True, True, [0, 4, 8, 12], True, 2, True]] * 4
