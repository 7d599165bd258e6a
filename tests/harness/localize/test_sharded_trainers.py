"""Whom blame finds in trainers whose parameters are DTensors: FSDP2's shards, and tensor parallelism's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bitproof.harness.capture.digest import digest
from bitproof.harness.case import Parallelism
from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.call_log import logged
from bitproof.harness.localize.logs.calls import Call, calls_from_text, calls_to_text
from bitproof.reference.parallel.mesh import Mesh
from tests.ranks import on_ranks

Log = tuple[str, dict[str, str]]

PARALLELISMS = ("fsdp", "tp")
FAULTS = ("none", "decay", "clip", "gelu", "early_mean")


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Trainer:
    """Two blocks, clipping and AdamW, with one fault at most."""

    def __init__(self, mesh: Mesh, parallelism: str, fault: str) -> None:
        torch.manual_seed(3)
        self.fault, self.is_split = fault, parallelism == "tp"
        self.model = nn.Sequential(Block(), Block())
        devices = init_device_mesh("cpu", (2,))
        for block in self.model:
            if self.is_split:
                parallelize_module(block, devices, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            else:
                fully_shard(block, mesh=devices)
        if fault == "gelu":
            self.model[1].forward = lambda x: x + self.model[1].down(nn.functional.silu(self.model[1].up(x)))
        decay = 0.1 if fault == "decay" else 0.01
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=decay, foreach=True)
        seed = 0 if self.is_split else mesh.rank
        self.x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def step(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what a trainer shows: loss, gradients as the update reads them, parameters."""
        loss = self.model(self.x).square().mean()
        loss.backward()
        yield "loss", loss
        if self.fault == "early_mean":
            grad = self.model[0].up.weight.grad
            assert isinstance(grad, DTensor)
            grad._local_tensor.mul_(0.5)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05 if self.fault == "clip" else 0.1)
        yield from ((f"grad {name}", parameter.grad) for name, parameter in self.model.named_parameters())
        self.optimizer.step()
        yield from ((f"param {name}", parameter) for name, parameter in self.model.named_parameters())


def log_of(trainer: Trainer) -> Log:
    with logged(trainer) as log:
        seen = {name: digest(value) for name, value in trainer.step()}
    return calls_to_text(log.calls), seen


def log_all(mesh: Mesh) -> dict[str, Log]:
    for each in PARALLELISMS:  # the first step makes optimizer states and asks sharding rules for shapes
        list(Trainer(mesh, each, "none").step())
    return {f"{each} {fault}": log_of(Trainer(mesh, each, fault)) for each in PARALLELISMS for fault in FAULTS}


@pytest.fixture(scope="module")
def logs() -> list[dict[str, Log]]:
    """By rank, and by parallelism and fault."""
    return on_ranks(Parallelism(world_size=2, ep=1), log_all)


def blamed(logs: list[dict[str, Log]], parallelism: str, fault: str) -> Culprit:
    sides = [[rank[f"{parallelism} {which}"] for rank in logs] for which in ("none", fault)]
    differing = {
        rank: [(right[1][name], seen) for name, seen in wrong[1].items() if right[1][name] != seen]
        for rank, (right, wrong) in enumerate(zip(*sides, strict=True))
    }
    assert any(differing.values()), "the fault changes nothing"
    culprit = find_culprit(*[[calls_from_text(text, "log") for text, _ in side] for side in sides], differing)
    assert culprit is not None
    return culprit


def calls_of(logs: list[dict[str, Log]], which: str) -> list[Call]:
    return calls_from_text(logs[0][which][0], "log")


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("parallelism", PARALLELISMS)
def test_an_optimizer_s_other_weight_decay_is_blamed(logs: list[dict[str, Log]], parallelism: str) -> None:
    culprit = blamed(logs, parallelism, "decay")
    assert (culprit.call.operator, culprit.call.place.direction) == ("_foreach_mul_.Scalar", "update")
    assert "where the reference has" in culprit.arguments


@pytest.mark.parametrize("parallelism", PARALLELISMS)
def test_clipping_to_another_norm_is_blamed(logs: list[dict[str, Log]], parallelism: str) -> None:
    culprit = blamed(logs, parallelism, "clip")
    assert (culprit.call.operator, culprit.call.place.direction) == ("mul.Tensor", "update")


@pytest.mark.parametrize("parallelism", PARALLELISMS)
def test_another_activation_is_blamed_in_its_module(logs: list[dict[str, Log]], parallelism: str) -> None:
    culprit = blamed(logs, parallelism, "gelu")
    assert (culprit.call.operator, culprit.call.place.module, culprit.call.place.direction) == ("silu", "1", "forward")


@pytest.mark.parametrize("parallelism", PARALLELISMS)
def test_a_gradient_that_is_scaled_before_it_is_clipped_is_blamed_there(
    logs: list[dict[str, Log]], parallelism: str
) -> None:
    culprit = blamed(logs, parallelism, "early_mean")
    assert culprit.call.operator == "mul_.Tensor"


def test_a_log_has_the_collectives_that_dtensors_ask_for_and_who_waits_for_them(logs: list[dict[str, Log]]) -> None:
    collectives = [call for call in calls_of(logs, "tp none") if call.collective]
    assert {call.operator for call in collectives} == {"all_reduce"}
    assert all(call.outputs for call in collectives)


def test_a_logged_dtensor_leaves_no_shapes_behind_that_were_only_asked_for(logs: list[dict[str, Log]]) -> None:
    for which in PARALLELISMS:
        opaque = [call for call in calls_of(logs, f"{which} none") if "opaque" in (*call.inputs, *call.outputs)]
        assert opaque == []
