"""Which ranks a step adds values of, and where in the step: seen on rank 0 of four that never meet."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.distributed.fake_pg import FakeStore

from bitproof.harness.powers.two_layouts.meetings import Sums

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # releases give collectives other names


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    dist.destroy_process_group()


def described(step) -> set[tuple[str, str, str, str, int]]:
    sums = Sums()
    observe = sums.noticing(lambda kind, name, tensor: None)
    with sums.at_work():
        sums.begin_step()
        step(observe)
    return {(m.phase, m.what, m.ranks, m.operator, m.backwards) for m in (sums.meetings or ())[1:]}


def test_each_part_of_a_step_has_its_own_sums(mesh):
    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda grad: all_reduce(grad, "sum", mesh["data"]).clone())

    def step(observe):
        dist.all_reduce(torch.ones(1))
        x.sum().backward()
        dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())
        observe("grad", "x", x.grad)
        dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2), group=mesh["data"].get_group())

    assert described(step) == {
        ("forward", "sum", "0,1,2,3", "allreduce_", 1),
        ("backward", "sum", "0,2", "all_reduce", 1),
        ("clip", "sum", "0,1", "allreduce_", 1),
        ("update", "sum", "0,2", "_reduce_scatter_base_", 1),
        ("forward", "parts", "", "", 1),
    }


def test_sums_that_a_dtensor_takes_are_seen(mesh):
    partial = DTensor.from_local(torch.ones(4), mesh["tp"], [Partial()])
    assert described(lambda observe: partial.full_tensor().clone()) == {("forward", "sum", "0,1", "all_reduce", 1)}


def test_a_sum_says_by_what_its_terms_or_it_are_rounded_and_how_many_are_added_at_once(mesh):
    def scales(step) -> set[tuple[str, str]]:
        return {(ranks, operator) for _, what, ranks, operator, _ in described(step) if what == "scale"}

    def before(observe):
        bucket = torch.ones(6)
        torch.mul(torch.ones(2), 1 / 3, out=bucket[:2])
        dist.all_reduce(bucket)
        bucket.div_(4)

    def after(observe):
        total = torch.ones(6)
        total.div_(2)
        dist.all_reduce(total)
        total.view(2, 3).div_(3)
        torch.ones(6).div_(5)

    assert scales(before) == {("0,1,2,3", f"before *{4 / 3:.17g}")}
    assert scales(after) == {("0,1,2,3", "after /1.5")}

    def copied(pack):
        def step(observe):
            dist.all_reduce(pack(torch.ones(2).div(3)))

        return step

    ones = torch.ones(6)
    for pack in (
        torch.clone,
        lambda x: x.double(),
        lambda x: torch.cat([torch.ones(2), x.view(1, 2)[0]]),
        lambda x: torch.ones(2).copy_(x),
        lambda x: (torch._foreach_copy_([ones[:2], ones[2:4]], [x, x]), ones)[1],
    ):
        assert scales(copied(pack)) == {("0,1,2,3", f"before /{1.5:.17g}")}
    assert scales(copied(lambda x: torch.ones(2).copy_(x.sign()))) == set()
    three = dist.new_group([0, 1, 2])
    for average in (
        lambda observe: dist.all_reduce(torch.ones(6), dist.ReduceOp.AVG, three),
        lambda observe: all_reduce(torch.ones(6), "avg", three).clone(),
    ):
        assert scales(average) == {("0,1,2", "after /1.5")}
    assert scales(lambda observe: dist.all_reduce(torch.ones(6), dist.ReduceOp.AVG)) == set(), "by 4, nothing rounds"

    sums = Sums()
    with sums.at_work():
        sums.begin_step()
        dist.all_reduce(torch.ones(6))
        dist.all_reduce(torch.ones(6), group=mesh["tp"].get_group())
    assert [met.elements for met in sums.meetings[1:]] == [6, 0], "over two ranks no place decides"


def test_backwards_of_one_step_are_counted(mesh):
    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda grad: dist.all_reduce(grad.clone()))

    def step(observe):
        for _ in range(3):
            x.sum().backward()

    assert described(step) == {("backward", "sum", "0,1,2,3", "allreduce_", 3)}


def test_exchanges_are_reported_and_gathers_are_not(mesh):
    def step(observe):
        dist.all_to_all_single(torch.ones(4), torch.ones(4))
        dist.all_gather_into_tensor(torch.ones(16), torch.ones(4))
        dist.broadcast(torch.ones(4), 0)

    assert described(step) == {("forward", "exchange", "0,1,2,3", "alltoall_base_", 1)}


def test_a_step_counts_its_backwards_though_no_rank_meets_another():
    sums = Sums()
    x = torch.ones(4, requires_grad=True)
    with sums.at_work():
        for count in (1, 2):
            sums.begin_step()
            for _ in range(count):
                x.sum().backward()
    (found,) = sums.meetings
    assert (found.what, found.backwards) == ("backward", 2)


def test_a_gradient_counts_what_was_added_to_it_by_backward_or_by_hand_and_by_nobody_else():
    x, y = (torch.ones(4, requires_grad=True) for _ in range(2))

    def step(observe):
        other = torch.ones(4)
        for _ in range(3):
            x.sum().backward()
            other += 1
        y.sum().backward()
        y.grad += torch.ones(4)
        for name, of in (("x", x), ("y", y)):
            observe("grad", name, of.grad)

    assert described(step) == {("forward", "parts", "", "", 3), ("forward", "parts", "", "", 2)}
