"""The group that sums on the device, over gloo on a CPU: what NCCL would carry, gloo carries."""

import pytest
import torch
import torch.distributed as dist

from bitproof.harness.case import Parallelism
from bitproof.harness.torch_distributed import register_group
from bitproof.reference.parallel import device_order_group
from bitproof.reference.parallel import mesh as meshes
from bitproof.reference.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from bitproof.reference.parallel.device_order_group import DeviceOrderGroup
from bitproof.reference.parallel.mesh import FSDP
from bitproof.reference.parallel.rank_order_group import sum_in_rank_order
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

FOUR = Parallelism(world_size=4, ep=2)
OWN = "device_order"

# Of these the sum depends on its order in float32 and in bfloat16: ascending is 1, descending 0, in pairs 0 or 2.
PARTS = torch.tensor([1e8, 1.0, -1e8, 1.0])


def on_own_group(body):
    """What `body` returns on each rank, which has the group under a name of its own."""

    def run(mesh):
        group = DeviceOrderGroup(dist.group.WORLD)
        register_group(OWN, group)
        return body(mesh)

    return on_ranks(FOUR, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_ascending_rank_order_and_have_the_bits_of_the_rank_order_group(dtype):
    def body(mesh):
        part = PARTS[mesh.rank].to(dtype)
        generator = torch.Generator().manual_seed(mesh.rank)
        values = torch.randn(4 * 33, generator=generator).to(dtype)
        scattered = [reduce_scatter(values, 4, name) for name in (OWN, FSDP)]
        reduced = [all_reduce(values.view(4, 33).t(), name) for name in (OWN, FSDP)]
        return [
            reduce_scatter(part.repeat(4), 4, OWN).tolist(),
            all_reduce(part.repeat(3), OWN).tolist(),
            torch.equal(*scattered) and torch.equal(*reduced),
        ]

    assert on_own_group(body) == [[[1.0], [1.0] * 3, True]] * 4


@pytest.mark.parametrize("num", [1, 3, 33])
def test_a_large_all_reduce_by_parts_has_the_bits_of_a_small_one_that_gathers(num, monkeypatch):
    def body(mesh):
        values = torch.randn(num, 3, generator=torch.Generator().manual_seed(mesh.rank)).t() * PARTS[mesh.rank]
        small = all_reduce(values, OWN)
        monkeypatch.setattr(device_order_group, "MOST_GATHERED", 4 * values.nbytes - 1)
        summed = []
        monkeypatch.setattr(
            device_order_group,
            "sum_in_rank_order",
            lambda parts: summed.append([*parts.shape]) or sum_in_rank_order(parts),
        )
        return torch.equal(small, all_reduce(values, OWN)), summed

    assert on_own_group(body) == [[True, [[4, -(-num * 3 // 4)]]]] * 4


def test_a_fused_reduce_scatter_has_the_bits_of_two():
    def body(mesh):
        values = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(mesh.rank))
        fused = reduce_scatter(values.permute(1, 0, 2).reshape(-1), 4, OWN).view(2, 50)
        apart = torch.stack([reduce_scatter(value.reshape(-1), 4, OWN) for value in values])
        return torch.equal(fused, apart)

    assert on_own_group(body) == [True] * 4


def test_rows_are_gathered_and_exchanged_uneven_and_empty_parts_included():
    def body(mesh):
        sent = [[0, 1, 2, 0], [1, 0, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0]]
        received = [row[mesh.rank] for row in sent]
        rows = torch.arange(3.0)[: sum(sent[mesh.rank])] + 10 * mesh.rank
        return [
            all_gather(torch.full((1, 2), float(mesh.rank)), 4, OWN)[:, 0].tolist(),
            all_to_all(rows, received, sent[mesh.rank], OWN).tolist(),
        ]

    moved = [[10.0, 30, 31, 32], [0.0], [1.0, 2], [11.0, 12]]
    assert on_own_group(body) == [[[0.0, 1, 2, 3], rows] for rows in moved]


def test_a_reduction_that_is_no_sum_is_refused():
    def body(mesh):
        with pytest.raises(ValueError, match=r"a rank-order group takes sums only, not .*MAX"):
            torch.ops._c10d_functional.all_reduce(torch.ones(2), "max", OWN)
        return True

    assert on_own_group(body) == [True] * 4


@pytest.mark.parametrize(("native", "kind"), [(False, "DeviceOrderGroup"), (True, "ProcessGroup")])
def test_a_mesh_over_nccl_sums_in_rank_order_unless_nccls_own_sums_are_asked_for(native, kind, monkeypatch):
    """gloo stands in for NCCL, which this machine may lack."""
    start = dist.init_process_group

    def start_gloo(backend, **options):
        assert backend == "nccl" and options.pop("device_id") == torch.device("cpu")
        start("gloo", **options)

    def join(mesh, device, store, *, backend, timeout, memory):
        meshes.join_groups(mesh, device, store, backend="nccl", timeout=timeout, native=native)

    monkeypatch.setattr(dist, "init_process_group", start_gloo)
    monkeypatch.setattr("tests.ranks.join_groups", join)
    two = Parallelism(world_size=2, ep=2)
    assert on_ranks(two, lambda mesh: type(meshes.joined_groups[FSDP]).__name__) == [kind] * 2
