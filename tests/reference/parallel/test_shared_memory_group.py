"""Collectives in shared memory, beside those of the rank-order group over gloo: the same bits, whatever is sent."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from bitproof.harness import shared_memory
from bitproof.harness.case import Parallelism
from bitproof.harness.torch_distributed import register_group
from bitproof.reference.parallel import mesh as meshes
from bitproof.reference.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from bitproof.reference.parallel.mesh import EXPERT, EXPERT_FSDP, FSDP, GROUP_NAMES, ensure_group
from bitproof.reference.parallel.rank_order_group import RankOrderGroup
from bitproof.reference.parallel.shared_memory_group import SharedMemoryGroup
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

ops = torch.ops._c10d_functional
THREE = Parallelism(world_size=3, ep=3)
INLINE = shared_memory.INLINE_BYTES


def over_gloo(mesh):
    """Each of the mesh's groups once more, over gloo, under its name and a dash."""
    kept = []
    for name in GROUP_NAMES:
        groups = [dist.new_group(ranks) for ranks in mesh.partition(name)]
        kept.append(RankOrderGroup(groups[[mesh.rank in ranks for ranks in mesh.partition(name)].index(True)]))
        register_group(name + "-", kept[-1])
    return kept


def is_same(first, second):
    """Whether two tensors have one dtype, shape and content."""
    same = (first.dtype, first.shape) == (second.dtype, second.shape)
    return same and first.flatten().view(torch.uint8).equal(second.flatten().view(torch.uint8))


def draw(mesh, *shape, dtype=torch.float32):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(mesh.rank)) * 10.0 ** (mesh.rank * 3)
    return values.to(dtype)


SIZES = [0, 1, 7, 4096, INLINE // 4, 300_000]
"""Elements of a part: nothing, little, odd, the last that fits with a header or just does not, many pieces."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_every_collective_has_the_bits_that_it_has_over_gloo(dtype):
    def body(mesh):
        kept, found = over_gloo(mesh), {}
        for size in SIZES if dtype == torch.float32 else SIZES[1:4]:
            x, whole = draw(mesh, size, dtype=dtype), draw(mesh, 3 * size, dtype=dtype)
            for name, call in {
                "gather": lambda group, x=x: all_gather(x, 3, group),
                "scatter": lambda group, x=whole: reduce_scatter(x, 3, group),
                "reduce": lambda group, x=x: all_reduce(x, group),
                "exchange": lambda group, x=whole, n=size: all_to_all(x, [n] * 3, [n] * 3, group),
            }.items():
                found[f"{name} {size}"] = is_same(call(FSDP), call(FSDP + "-"))
        return found if len(kept) == 4 else {}

    for found in on_ranks(THREE, body, collectives="shared"):
        assert found
        assert [name for name, same in found.items() if not same] == []


@pytest.mark.parametrize("scale", [1, 50_000], ids=["in slots", "in pieces"])
def test_uneven_and_empty_splits_arrive_as_over_gloo(scale):
    """Rank i sends `rows[i][j]` rows to rank j: one sends nothing, one receives nothing."""
    rows = [[2, 0, 3], [0, 0, 0], [1, 0, 4]]

    def body(mesh):
        kept = over_gloo(mesh)
        sent = [scale * n for n in rows[mesh.rank]]
        received = [scale * row[mesh.rank] for row in rows]
        x = draw(mesh, sum(sent), 2)
        first, second = (all_to_all(x, received, sent, group) for group in (EXPERT, EXPERT + "-"))
        return [is_same(first, second), first.shape[0] // scale, len(kept)]

    assert on_ranks(THREE, body, collectives="shared") == [[True, 3, 4], [True, 0, 4], [True, 7, 4]]


def test_ranks_of_which_one_alone_sends_too_much_for_a_slot_stay_in_step():
    def body(mesh):
        many, found = INLINE // 4, []
        for round_ in range(3):
            sent = [many if mesh.rank == round_ else 1] * 3
            received = [many if rank == round_ else 1 for rank in range(3)]
            x = torch.full((sum(sent),), float(mesh.rank))
            launched = [ops.all_to_all_single(x + i, received, sent, EXPERT) for i in range(2)]
            expected = torch.cat([torch.full((n,), float(rank)) for rank, n in enumerate(received)])
            found += [is_same(ops.wait_tensor(launched[i]), expected + i) for i in (1, 0)]
        return found

    assert on_ranks(THREE, body, collectives="shared") == [[True] * 6] * 3


def test_collectives_under_way_together_may_be_waited_for_in_any_order():
    def body(mesh):
        count = shared_memory.INLINE_SLOTS + 3  # more than fit: the oldest are finished by later launches
        order = torch.randperm(count, generator=torch.Generator().manual_seed(7 + mesh.rank)).tolist()
        launched = {}
        for i in range(count):
            group = (FSDP, EXPERT)[i % 2]
            launched[i] = ops.reduce_scatter_tensor(torch.arange(4.0) + i + mesh.rank, "sum", 2, group)
        results = {i: ops.wait_tensor(launched[i]).tolist() for i in order}
        return [results[i] for i in range(count)]

    def expected(rank):
        return [[2 * (j + i) + 1.0 for j in (2 * rank, 2 * rank + 1)] for i in range(shared_memory.INLINE_SLOTS + 3)]

    two = Parallelism(world_size=2, ep=2)
    assert on_ranks(two, body, collectives="shared") == [expected(0), expected(1)]


def test_parts_of_the_world_and_groups_that_a_graph_asks_for_have_memory_of_their_own():
    def body(mesh):
        ensure_group("extra", mesh.partition(EXPERT))
        launched = [
            ops.all_gather_into_tensor(torch.tensor([10.0 * i + mesh.rank]), 2, group)
            for i, group in enumerate((EXPERT, EXPERT_FSDP, "extra"))
        ]
        return [ops.wait_tensor(x).tolist() for x in reversed(launched)]

    found = on_ranks(Parallelism(world_size=4, ep=2), body, collectives="shared")
    assert found[1] == [[20, 21], [11, 13], [0, 1]]
    assert found[2] == [[22, 23], [10, 12], [2, 3]]


def test_groups_beyond_the_areas_of_the_mapping_meet_over_gloo():
    def body(mesh):
        for i in range(20):
            ensure_group(f"extra{i}", [[0, 1]])
        groups = [type(_resolve_process_group(f"extra{i}")) for i in range(20)]
        total = all_reduce(torch.ones(1), "extra19").item()
        return [groups.count(SharedMemoryGroup), groups[-1].__name__, total, len(meshes.shared_memories)]

    two = Parallelism(world_size=2, ep=2)
    assert on_ranks(two, body, collectives="shared") == [[14, "RankOrderGroup", 2.0, 1]] * 2


def test_collectives_in_place_and_of_lists_and_of_tensors_with_gaps_work():
    def body(mesh):
        group = _resolve_process_group(FSDP)
        x = torch.full((2, 3), float(mesh.rank + 1)).t()  # its memory is in another order
        dist.all_reduce(x, group=group)
        gathered = torch.zeros(4, 2).t()
        group._allgather_base(gathered.t().contiguous().view(4, 2), torch.ones(2, 2)).wait()
        parts = [torch.full((2,), 1.0 + mesh.rank), torch.full((4,), 5.0)]
        outs = [torch.empty(1), torch.empty(2)]
        group.reduce_scatter_tensor_coalesced(outs, parts).wait()
        return [x.tolist(), [out.tolist() for out in outs]]

    two = Parallelism(world_size=2, ep=2)
    assert on_ranks(two, body, collectives="shared") == [[[[3.0] * 2] * 3, [[3.0], [10.0, 10.0]]]] * 2


ONES = torch.ones
DISAGREEING = {
    "an exchange against a gather": (
        lambda: all_to_all(ONES(4), [2, 2], [2, 2], FSDP),
        lambda: all_gather(ONES(2), 2, FSDP),
        ("all_to_all of float32[rows]", "all_gather of float32[2]"),
    ),
    "a gather against a reduction of as many bytes": (
        lambda: all_gather(ONES(8), 2, FSDP),
        lambda: all_reduce(ONES(8), FSDP),
        ("all_gather of float32[8]", "all_reduce of float32[8]"),
    ),
    "a scatter against an exchange of as many bytes": (
        lambda: reduce_scatter(ONES(8), 2, FSDP),
        lambda: all_to_all(ONES(8), [4, 4], [4, 4], FSDP),
        ("reduce_scatter of float32[8]", "all_to_all of float32[rows]"),
    ),
    "another dtype of as many bytes": (
        lambda: all_reduce(ONES(8), FSDP),
        lambda: all_reduce(ONES(16, dtype=torch.bfloat16), FSDP),
        ("all_reduce of float32[8]", "all_reduce of bfloat16[16]"),
    ),
    "another shape of as many bytes": (
        lambda: all_gather(ONES(4, 6), 2, FSDP),
        lambda: all_gather(ONES(8, 3), 2, FSDP),
        ("all_gather of float32[4, 6]", "all_gather of float32[8, 3]"),
    ),
    "rows of another length": (
        lambda: all_to_all(ONES(2, 6), [1, 1], [1, 1], FSDP),
        lambda: all_to_all(ONES(4, 3), [2, 2], [2, 2], FSDP),
        ("all_to_all of float32[rows, 6]", "all_to_all of float32[rows, 3]"),
    ),
    "a message that goes in pieces against one in a slot": (
        lambda: all_gather(ONES(300_000), 2, FSDP),
        lambda: all_gather(ONES(10), 2, FSDP),
        ("all_gather of float32[300000]", "all_gather of float32[10]"),
    ),
    "two messages in pieces": (
        lambda: all_reduce(ONES(300_000), FSDP),
        lambda: all_reduce(ONES(600_000, dtype=torch.bfloat16), FSDP),
        ("all_reduce of float32[300000]", "all_reduce of bfloat16[600000]"),
    ),
    "a shape longer than the header has room for, in its last dim": (
        lambda: all_reduce(ONES(*[1] * 60, 2, 3), FSDP),
        lambda: all_reduce(ONES(*[1] * 60, 3, 2), FSDP),
        ("1, 2, 3]", "all_reduce of float32[1, 1, 1, "),
    ),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_ranks_whose_calls_differ_are_both_reported_and_never_given_each_others_bytes(name):
    *calls, reported = DISAGREEING[name]

    def body(mesh):
        with pytest.raises(RuntimeError) as raised:
            calls[mesh.rank]()
        return str(raised.value)

    first, second = on_ranks(Parallelism(world_size=2, ep=2), body, collectives="shared")
    opening = "ranks disagree on collective 0 of ranks [0, 1]: "
    if "longer" in name:
        assert first.startswith(opening) and all(part in first for part in reported)
        return
    assert first == f"{opening}rank 0 calls {reported[0]}, rank 1 calls {reported[1]}"
    assert second == f"{opening}rank 1 calls {reported[1]}, rank 0 calls {reported[0]}"


def test_a_rank_that_swaps_two_collectives_is_named_by_its_number_in_the_run_and_not_in_the_group():
    def body(mesh):
        if mesh.rank in (0, 2):  # groups of every other rank
            return all_gather(torch.ones(2), 2, EXPERT_FSDP).tolist()
        calls = [lambda: all_gather(torch.ones(2), 2, EXPERT_FSDP), lambda: all_reduce(torch.ones(2), EXPERT_FSDP)]
        for call in calls if mesh.rank == 1 else reversed(calls):
            try:
                call()
            except RuntimeError as error:
                return str(error)
        return None

    found = on_ranks(Parallelism(world_size=4, ep=2), body, collectives="shared")
    text = (
        "ranks disagree on collective 0 of ranks [1, 3]: rank 3 calls all_reduce of float32[2], rank 1 calls all_gather"
    )
    assert found[0] == found[2] == [1.0] * 4
    assert found[3] == f"{text} of float32[2]"


def test_ranks_that_count_rows_differently_are_reported():
    def body(mesh):
        if mesh.rank == 0:
            return all_to_all(torch.ones(4), [2, 2], [2, 2], FSDP).tolist()
        with pytest.raises(RuntimeError) as raised:
            all_to_all(torch.ones(4), [1, 2], [2, 2], FSDP)
        return str(raised.value)

    assert on_ranks(Parallelism(world_size=2, ep=2), body, collectives="shared") == [
        [1.0] * 4,
        "ranks disagree on collective 0 of ranks [0, 1]: rank 1 expects 4 bytes of rank 0 in all_to_all of "
        "float32[rows], rank 0 sends 8",
    ]


@pytest.mark.parametrize(
    "size", [8, INLINE // 4 + 8, 300_000, 1_500_000], ids=["little", "just over", "pieces", "many"]
)
def test_what_is_written_into_an_input_after_the_launch_is_not_sent_whatever_the_size_and_the_transport(size):
    launches = {
        "gather": lambda x, group: ops.all_gather_into_tensor(x, 2, group),
        "scatter": lambda x, group: ops.reduce_scatter_tensor(x, "sum", 2, group),
        "reduce": lambda x, group: ops.all_reduce(x, "sum", group),
        "exchange": lambda x, group: ops.all_to_all_single(x, [size // 2] * 2, [size // 2] * 2, group),
    }

    def body(mesh):
        kept, found = over_gloo(mesh), {}
        for group in (FSDP, FSDP + "-"):
            for name, launch in launches.items():
                x = torch.full((size,), 1.0)
                launched = launch(x, group)
                x.fill_(100.0)
                values = ops.wait_tensor(launched).unique().tolist()
                found[f"{name} {group}"] = values == [2.0 if name in ("scatter", "reduce") else 1.0]
        return [name for name, right in found.items() if not right] if len(found) == 8 and kept else ["nothing ran"]

    assert on_ranks(Parallelism(world_size=2, ep=2), body, collectives="shared") == [[], []]
