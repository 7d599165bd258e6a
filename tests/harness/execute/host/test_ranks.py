"""What a rank that is forked here finds: the environment that trainers of others read."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.execute.host.ranks import environment_of, reserved_port
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.execute.requests import RankSlots
from bitproof.harness.options import RunOptions
from bitproof.harness.runtime.launched import FORKED, is_rank
from bitproof.reference.parallel.mesh import Mesh

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", FORKED)


class Foreign:
    """A trainer as libraries write it: it trains alone where the environment names no other rank."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        self.is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        if not self.is_alone and not dist.is_initialized():
            dist.init_process_group("gloo")
        self.weight = torch.ones(3)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, case.parallelism.world_size, is_master=mesh.rank == 0)
        store.set(str(mesh.rank), "is here")
        self.met = [store.get(str(rank)).decode() for rank in range(case.parallelism.world_size)]
        dist.barrier()
        self.has_server = store

    def manifest(self) -> dict[str, Any]:
        """What this rank found."""
        return {name: os.environ.get(name) for name in NAMES} | {"met": self.met, "is_rank": is_rank()}

    def step(self, index: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Gradients that are summed over ranks, unless there is one."""
        grad = self.weight * (1.0 + int(os.environ["RANK"]))
        if not self.is_alone:
            dist.all_reduce(grad)
        self.weight = self.weight - grad / 8
        yield "loss", "loss", grad.sum()
        yield "grad", "weight", grad
        yield "param", "weight", self.weight
        yield "optimizer", "weight.grad", grad


def foreign(case: Case, mesh: Mesh) -> Foreign:
    return Foreign(case, mesh)


@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
def test_a_trainer_of_others_trains_together_and_nothing_of_that_leaves_the_ranks(tmp_path: Path) -> None:
    system = f"{__name__}:foreign"
    case = Case(
        name="foreign",
        family="toy",
        reference=system,
        candidate=system,
        steps=1,
        parallelism=Parallelism(world_size=2, ep=1),
    )
    before = dict(os.environ)
    [result] = run_cases([case], RunOptions(device="cpu", control="never"), tmp_path)
    assert (result.verdict, result.error) == ("EQUAL", None)
    assert dict(os.environ) == before
    [file, _] = sorted(tmp_path.rglob("manifest.json"))
    manifest = json.loads(file.read_text())
    for rank, said in enumerate(manifest["ranks"]):
        assert [said[name] for name in NAMES[:4]] == [str(rank), str(rank), "2", "2"]
        assert said["met"] == ["is here", "is here"], "their own store works, too"
        assert said["is_rank"] is False, "a command that a rank starts is nobody's rank"
    assert not {"RANK", "WORLD_SIZE", FORKED} & manifest["environment"].keys()


def test_a_port_is_kept_for_the_store_of_a_trainer() -> None:
    with reserved_port() as reserved:
        address, port = reserved.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((address, port))
        with socket.socket() as asking:
            assert asking.connect_ex((address, port)) == errno.ECONNREFUSED
        store = dist.TCPStore(address, port, 1, is_master=True)
        store.set("rank 0", "is here")
        assert dist.TCPStore(address, port, is_master=False).get("rank 0") == b"is here"


@pytest.mark.parametrize("attribute", ["RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_what_the_caller_had_of_these_is_not_a_ranks(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(attribute, "stale")
    found = environment_of(1, 4, RankSlots(ranks=(0, 1, 2, 3), part="", store=""), 123)
    assert found == {
        FORKED: "1",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "123",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def test_ranks_of_a_launcher_are_numbered_as_they_found_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")
    rank_slots = RankSlots(
        ranks=(3,), part="", store="", server=("node0", 29500), local_rank=1, local_world_size=2, gpu=0
    )
    assert environment_of(3, 4, rank_slots, 0) == {
        FORKED: "3",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
