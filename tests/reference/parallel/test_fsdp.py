import pytest
import torch
from torch import nn

from bitproof.harness.case import Parallelism, Precision
from bitproof.harness.errors import CaseError
from bitproof.reference.init import initial_values
from bitproof.reference.parallel.fsdp import fully_shard, placement_hash
from bitproof.reference.parallel.mesh import Mesh
from tests.ranks import on_ranks

CPU = torch.device("cpu")


class Experts(nn.Module):
    """Four experts of one weight each; the `exchange` marks them as routed."""

    exchange = None

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 3))

    def forward(self):
        return self.w


def sharded(mesh, module):
    model = nn.ModuleDict({"part": module})
    fully_shard(model, mesh, Precision(compute="float32"), seed=7, device=CPU)
    return model.part


@pytest.mark.ranks
def test_gathering_a_parameter_gives_its_initial_values_on_every_rank():
    def body(mesh):
        return sharded(mesh, nn.Linear(3, 8, bias=False)).weight.tolist()

    expected = initial_values("part.weight", (8, 3), 7).tolist()
    assert on_ranks(Parallelism(world_size=4, ep=2), body) == [expected] * 4


@pytest.mark.ranks
def test_rows_that_do_not_divide_among_ranks_are_padded_with_zeros_that_stay_zero():
    def body(mesh):
        layer = sharded(mesh, nn.Linear(3, 5, bias=False))
        (gradient,) = torch.autograd.grad(layer.weight.sum(), list(layer.parameters()))
        return [list(layer.weight.shape), next(layer.parameters()).tolist(), gradient.tolist()]

    answers = on_ranks(Parallelism(world_size=4, ep=1), body)
    full = initial_values("part.weight", (5, 3), 7)
    padded = torch.cat([full, torch.zeros(3, 3)]).view(4, 2, 3)
    ones = torch.cat([torch.ones(5, 3), torch.zeros(3, 3)]).view(4, 2, 3) * 4
    assert answers == [[[5, 3], padded[rank].tolist(), ones[rank].tolist()] for rank in range(4)]


@pytest.mark.ranks
def test_experts_are_split_over_the_expert_group_before_they_are_sharded():
    def body(mesh):
        return sharded(mesh, Experts()).w.tolist()

    full = initial_values("part.w", (4, 3), 7)
    low, high = full[:2].tolist(), full[2:].tolist()
    assert on_ranks(Parallelism(world_size=4, ep=2), body) == [low, high, low, high]


@pytest.mark.ranks
def test_a_tensor_parallel_parameter_is_split_along_its_dim_before_it_is_sharded():
    def body(mesh):
        model = nn.ModuleDict({"out": nn.Linear(3, 6, bias=False), "in": nn.Linear(4, 5, bias=False)})
        dims = {"out.weight": 0, "in.weight": 1}
        fully_shard(model, mesh, Precision(compute="float32"), 7, CPU, dims)
        shards = [list(parameter.shape) for parameter in model.parameters()]
        (gradient,) = torch.autograd.grad(model["in"].weight.sum(), [model["in"]._parameters["weight"]])
        return [model["out"].weight.tolist(), model["in"].weight.tolist(), shards, gradient.tolist()]

    answers = on_ranks(Parallelism(world_size=4, ep=1, tp=2), body)
    by_output, by_input = initial_values("out.weight", (6, 3), 7), initial_values("in.weight", (5, 4), 7)
    shapes = [[2, 3], [3, 2]]  # 3 rows of 6, and 5 rows, over two ranks each
    twos, padded = [[2.0, 2.0]] * 3, [[2.0, 2.0], [2.0, 2.0], [0.0, 0.0]]
    low = [by_output[:3].tolist(), by_input[:, :2].tolist(), shapes]
    high = [by_output[3:].tolist(), by_input[:, 2:].tolist(), shapes]
    assert answers == [[*low, twos], [*high, twos], [*low, padded], [*high, padded]]


@pytest.mark.ranks
def test_a_rank_may_hold_nothing_but_padding():
    def body(mesh):
        layer = sharded(mesh, nn.Linear(3, 5, bias=False))
        (gradient,) = torch.autograd.grad(layer.weight.square().sum(), list(layer.parameters()))
        return [next(layer.parameters()).tolist(), gradient.tolist()]

    last = on_ranks(Parallelism(world_size=4, ep=1), body)[3]
    assert last == [[[0.0] * 3] * 2] * 2


@pytest.mark.ranks
def test_a_parameter_computes_in_bfloat16_and_reduces_in_float32():
    def body(mesh):
        layer = nn.ModuleDict({"part": nn.Linear(3, 2, bias=False)})
        fully_shard(layer, mesh, Precision(), seed=7, device=CPU)
        weight = layer.part.weight
        # 1 + 2^-9 is no bfloat16: summed in that dtype, the small gradient of rank 1 would be lost.
        scale = 1.0 if mesh.rank == 0 else 2.0**-9
        (gradient,) = torch.autograd.grad((weight * scale).sum(), list(layer.parameters()))
        return [str(weight.dtype), str(gradient.dtype), gradient.flatten().unique().tolist()]

    assert on_ranks(Parallelism(world_size=2, ep=1), body) == [["torch.bfloat16", "torch.float32", [1 + 2.0**-9]]] * 2


@pytest.mark.ranks
def test_a_module_that_runs_twice_gathers_and_reduces_twice():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    def body(mesh):
        layer = sharded(mesh, nn.Linear(3, 4, bias=False))
        x = torch.ones(2, 3)
        with Count() as count:
            torch.autograd.grad((layer(x) + layer(x)).sum(), list(layer.parameters()))
        return [count.names.count("all_gather_into_tensor"), count.names.count("reduce_scatter_tensor")]

    assert on_ranks(Parallelism(world_size=2, ep=1), body) == [[2, 2]] * 2


def test_the_meta_device_gets_shapes_without_values():
    layer = nn.ModuleDict({"part": nn.Linear(3, 8, bias=False, device="meta")})
    fully_shard(layer, Mesh(0, Parallelism()), Precision(), seed=7, device=torch.device("meta"))
    assert [(p.shape, p.device.type) for p in layer.parameters()] == [((1, 3), "meta")]


def test_experts_that_ranks_cannot_share_evenly_are_refused():
    model = nn.ModuleDict({"experts": nn.Linear(4, 3, bias=False)})
    model["experts"].exchange = None
    with pytest.raises(CaseError) as refusal:
        fully_shard(model, Mesh(0, Parallelism(world_size=2, ep=2)), Precision(), 7, torch.device("meta"))
    assert str(refusal.value) == (
        "CaseError: ranks of group ep cannot share a parameter evenly\n"
        "  expected: an extent that 2 divides along dim 0: every rank holds as many experts\n"
        "  found: shape (3, 4)\n"
        "  fix: choose another model size, or another ep"
    )


@pytest.mark.ranks
def test_a_replicated_parameter_is_whole_on_every_rank_and_its_gradient_is_summed():
    def body(mesh):
        model = nn.ModuleDict({"part": nn.Linear(3, 5, bias=False)})
        fully_shard(model, mesh, Precision(compute="float32"), seed=7, device=CPU, replicated=["part.weight"])
        shard = next(model.parameters())
        (gradient,) = torch.autograd.grad((model.part.weight * (mesh.rank + 1)).sum(), shard)
        return [shard.tolist(), gradient.tolist(), placement_hash(model)]

    answers = on_ranks(Parallelism(world_size=2, ep=1), body)
    assert answers[0] == answers[1], "the hash says nothing of what differs from rank to rank"
    assert answers[0][:2] == [initial_values("part.weight", (5, 3), 7).tolist(), [[3.0] * 3] * 5]


def test_the_hash_of_placements_shows_a_replicated_parameter_from_a_sharded_one_and_no_rank_from_another():
    def described(rank, replicated):
        model = nn.ModuleDict({"part": nn.Linear(3, 5, bias=False)})
        mesh = Mesh(rank, Parallelism(world_size=2, ep=1))
        fully_shard(model, mesh, Precision(), 7, torch.device("meta"), replicated=replicated)
        return placement_hash(model)

    assert described(0, []) == described(1, []) != described(0, ["part.weight"]) == described(1, ["part.weight"])


def test_a_plan_for_a_parameter_that_is_not_there_is_refused():
    model = nn.ModuleDict({"part": nn.Linear(3, 5, bias=False)})
    with pytest.raises(CaseError, match=r"a plan places parameters[^\n]*\n[^\n]*\n  found: part\.bias$"):
        fully_shard(model, Mesh(0, Parallelism()), Precision(), 7, torch.device("meta"), replicated=["part.bias"])


def tied():
    model = nn.ModuleDict({"first": nn.Linear(3, 4, bias=False), "last": nn.Linear(3, 4, bias=False)})
    model.last.weight = model.first.weight
    return model


def shard(model, tensor_dims=None):
    mesh = Mesh(0, Parallelism(world_size=2, ep=1, tp=2))
    fully_shard(model, mesh, Precision(compute="float32"), 7, CPU, tensor_dims)
    return dict(model.named_parameters(remove_duplicate=False))


def test_a_parameter_of_two_modules_is_one_shard():
    found = shard(tied())
    assert found.keys() == {"first.weight", "last.weight"} and found["first.weight"] is found["last.weight"]
    assert torch.equal(found["last.weight"], initial_values("first.weight", (4, 3), 7))


def test_a_module_in_two_places_is_sharded_once():
    model = tied()
    model.last = model.first
    found = shard(model, {"first.weight": 0})
    assert found["first.weight"] is found["last.weight"] and found["last.weight"].shape == (2, 3)


def test_a_parameter_of_two_modules_that_are_split_in_different_ways_is_refused():
    with pytest.raises(CaseError) as error:
        shard(tied(), {"first.weight": 0})
    assert str(error.value).startswith(
        "CaseError: last.weight cannot be one parameter with first.weight, as the ranks share the two in different "
        "ways\n  expected: Sharding(group='fsdp', size=1, part=(0, 0, 2), rows=2, "
    )
