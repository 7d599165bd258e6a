import math

import pytest
import torch

from bitproof.harness.case import Parallelism
from bitproof.reference.parallel.expert import CapacityExchange, ExpertExchange
from bitproof.reference.parallel.mesh import EXPERT
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

TWO = Parallelism(world_size=2, ep=2)

# Four experts, two a rank. A row is [expert, sender, index within sender].
COUNTS = {0: [1, 0, 2, 1], 1: [2, 1, 0, 3]}


def rows_of(rank):
    experts = [expert for expert, count in enumerate(COUNTS[rank]) for _ in range(count)]
    return torch.tensor([[expert, rank, index] for index, expert in enumerate(experts)], dtype=torch.float32)


def test_rows_reach_their_expert_in_order_of_expert_then_sender_then_row():
    def body(mesh):
        exchange = ExpertExchange(2, EXPERT)
        rows, ends, _ = exchange.dispatch(rows_of(mesh.rank), torch.tensor(COUNTS[mesh.rank]))
        return [rows.tolist(), ends.tolist(), str(ends.dtype)]

    low = [[0, 0, 0], [0, 1, 0], [0, 1, 1], [1, 1, 2]]
    high = [[2, 0, 1], [2, 0, 2], [3, 0, 3], [3, 1, 3], [3, 1, 4], [3, 1, 5]]
    assert on_ranks(TWO, body) == [[low, [3, 4], "torch.int32"], [high, [2, 6], "torch.int32"]]


def test_combine_is_the_inverse_of_dispatch_and_so_is_its_gradient():
    def body(mesh):
        exchange = ExpertExchange(2, EXPERT)
        rows = rows_of(mesh.rank).requires_grad_()
        there, _, route = exchange.dispatch(rows, torch.tensor(COUNTS[mesh.rank]))
        back = exchange.combine(there * 3, route)
        weights = torch.arange(back.numel(), dtype=torch.float32).view_as(back)
        (gradient,) = torch.autograd.grad((back * weights).sum(), rows)
        return [torch.equal(back, rows * 3), torch.equal(gradient, weights * 3)]

    assert on_ranks(TWO, body) == [[True, True]] * 2


def test_ranks_that_get_no_row_at_all_still_take_part():
    def body(mesh):
        exchange = ExpertExchange(2, EXPERT)
        rows = torch.ones(3, 2, requires_grad=True)
        there, ends, route = exchange.dispatch(rows, torch.tensor([3, 0, 0, 0]))
        (gradient,) = torch.autograd.grad(exchange.combine(there, route).sum(), rows)
        return [list(there.shape), ends.tolist(), gradient.tolist()]

    ones = [[1.0, 1.0]] * 3
    assert on_ranks(TWO, body) == [[[6, 2], [6, 6], ones], [[0, 2], [0, 0], ones]]


def over_capacity(rank: int, capacity: float) -> tuple[list[list[float]], list[bool]]:
    """By hand: the rows that a rank's two experts hold, by sender and slot, and which of its rows were kept."""
    slots = math.ceil(capacity * ROWS / 4)
    held = []
    for expert in (2 * rank, 2 * rank + 1):
        for sender in (0, 1):
            sent = [row for row in rows_of(sender).tolist() if row[0] == expert][:slots]
            held += sent + [[0.0, 0.0, 0.0]] * (slots - len(sent))
    kept = [row[2] - sum(UNEVEN[rank][: int(row[0])]) < slots for row in rows_of(rank).tolist()]
    return held, kept


ROWS = 6
UNEVEN = {0: [4, 0, 1, 1], 1: [0, 1, 5, 0]}


@pytest.mark.parametrize("capacity", [0.1, 1.0, 1.25, 4.0])
def test_an_expert_takes_of_each_rank_so_many_rows_and_the_others_come_back_as_zeros(monkeypatch, capacity):
    monkeypatch.setitem(globals(), "COUNTS", UNEVEN)

    def body(mesh):
        exchange = CapacityExchange(2, EXPERT, capacity)
        rows = rows_of(mesh.rank).requires_grad_()
        there, ends, slots = exchange.dispatch(rows, torch.tensor(UNEVEN[mesh.rank]))
        back = exchange.combine(there * 3, slots)
        weights = torch.arange(1, back.numel() + 1, dtype=torch.float32).view_as(back)
        (gradient,) = torch.autograd.grad((back * weights).sum(), rows)
        held, kept = over_capacity(mesh.rank, capacity)
        mask = torch.tensor(kept).unsqueeze(1)
        return [
            there.tolist() == held,
            ends.tolist() == [len(held) // 2, len(held)] and ends.dtype == torch.int32,
            torch.equal(back, rows * 3 * mask),
            torch.equal(gradient, weights * 3 * mask),
            all(kept),
        ]

    assert on_ranks(TWO, body) == [[True] * 4 + [capacity == 4.0]] * 2
