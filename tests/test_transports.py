"""Ranks that meet in shared memory compute the bits that they compute over gloo: the main cases, and a night's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bitproof.builtin_cases import CASES
from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.case import Case, Model, Parallelism
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.systems.graph import prepare
from bitproof.harness.systems.graph_program import make_graph_system
from bitproof.reference.parallel import mesh as meshes
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import make_eager
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
NAMES = ("transformer_batch", "moe_batch", "moe_seq")
NIGHTLY = ("blocks_batch_nightly", "experts_batch_nightly", "experts_seq_nightly")
# The other cases ask for the same collectives, of the same dtypes, in other places of a step.
QUICK = ("moe_seq", "experts_seq_nightly")


def small(name: str, ranks: int) -> Case:
    """A case with one layer, of experts, on fewer ranks, two of which share experts."""
    model, parallelism = Model(layers=1, dense_layers=0), Parallelism(world_size=ranks, ep=2)
    parallelism = replace(parallelism, shared_groups=CASES[name].parallelism.shared_groups)
    return replace(CASES[name], model=model, parallelism=parallelism, steps=1 if name in QUICK else 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES + NIGHTLY]
)
def test_every_tensor_of_a_case_is_equal_in_shared_memory_and_over_gloo(name: str) -> None:
    case = small(name, ranks=4 if name == "experts_seq_nightly" else 2)
    set_determinism(case.seed)
    program = prepare(case, CPU)

    def body(mesh: Mesh) -> dict[str, Any]:
        systems = {
            "eager_chunked": make_eager(case, mesh, CPU, True, lambda gradients: gradients),
            "graph": make_graph_system(case, mesh, CPU, program, lambda gradients: gradients),
        }
        found = {}
        for system, trainer in systems.items():
            recorder = Recorder(mesh.rank)
            for recorder.step in range(case.steps):
                trainer.step(recorder.step, recorder.observe)
            found |= {f"{system} {key}": row.digest for key, row in recorder.rows.items()}
        return {
            "records": found,
            "groups": sorted({type(group).__name__ for group in meshes.joined_groups.values()} - {"LoneGroup"}),
        }

    shared, gloo = (on_ranks(case.parallelism, body, collectives=where) for where in ("shared", "gloo"))
    assert [rank["groups"] for rank in shared] == [["SharedMemoryGroup"]] * len(shared)
    assert [rank["groups"] for rank in gloo] == [["RankOrderGroup"]] * len(gloo)
    assert all(len(rank["records"]) > 100 for rank in gloo)
    assert [rank["records"] for rank in shared] == [rank["records"] for rank in gloo]
