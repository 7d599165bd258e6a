"""What a group tells of its collectives, and that it computes what the group within does."""

import pytest
import torch
import torch.distributed as dist

from bitproof.harness.case import Parallelism
from bitproof.harness.shared_memory import Board
from bitproof.harness.torch_distributed import register_group
from bitproof.reference.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from bitproof.reference.parallel.device_order_group import DeviceOrderGroup
from bitproof.reference.parallel.reporting_group import ReportingGroup
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

TWO = Parallelism(world_size=2, ep=2)


@pytest.mark.parametrize("of", [DeviceOrderGroup, lambda group: group], ids=["in rank order", "torch's own"])
def test_a_reported_group_moves_and_adds_what_the_group_within_does_and_reports_each_collective(of):
    """The second is what NCCL's own sums go through, with gloo in NCCL's place."""

    def body(mesh):
        lines = []
        group = ReportingGroup(of(dist.group.WORLD), "own", lines.append)
        register_group("own", group)
        x = torch.arange(4.0) + mesh.rank
        found = [
            all_gather(x, 2, "own").tolist(),
            reduce_scatter(x, 2, "own").tolist(),
            all_reduce(x, "own").tolist(),
            all_to_all(x, [2, 2], [2, 2], "own").tolist(),
        ]
        return [found, lines]

    (first, lines), (second, _) = on_ranks(TWO, body)
    assert first == [[0, 1, 2, 3, 1, 2, 3, 4], [1, 3], [1, 3, 5, 7], [0, 1, 1, 2]]
    assert second == [[0, 1, 2, 3, 1, 2, 3, 4], [5, 7], [1, 3, 5, 7], [2, 3, 3, 4]]
    kinds = ["all_gather 1", "reduce_scatter 2", "all_reduce 3", "all_to_all 4"]
    about = [f"{kind} of group own, 16 bytes of float32" for kind in kinds]
    assert lines == [
        f"{said} {what}" for what in about for said in ("launches", "launched", "waits for", "has waited for")
    ]


def test_a_mesh_that_is_given_a_board_shows_there_and_one_that_is_not_is_as_it_was(monkeypatch):
    from bitproof.reference.parallel import mesh as meshes

    join, board = meshes.join_groups, Board(2)
    kind = on_ranks(TWO, lambda mesh: type(meshes.joined_groups["fsdp"]).__name__)
    assert kind == ["RankOrderGroup"] * 2
    monkeypatch.setattr("tests.ranks.join_groups", lambda *given, **options: join(*given, **options, board=board))
    on_ranks(TWO, lambda mesh: all_reduce(torch.ones(2), "fsdp").tolist())
    assert [board.read(rank) for rank in range(2)] == [
        "has waited for all_reduce 1 of group fsdp, 8 bytes of float32"
    ] * 2
