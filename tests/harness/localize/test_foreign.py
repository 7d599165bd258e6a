"""Whom blame finds in trainers that know nothing of bitproof: a graph traced by themselves, calls over lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from bitproof.harness.capture.digest import digest
from bitproof.harness.case import Parallelism
from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.call_log import logged
from bitproof.harness.localize.logs.calls import calls_from_text, calls_to_text
from bitproof.reference.parallel.mesh import Mesh
from tests.ranks import on_ranks

aten = torch.ops.aten
Log = tuple[str, dict[str, str]]
"""A rank's calls as text, and the digest of each gradient."""


def log_of(system: Any) -> Log:
    with logged(system) as log:
        seen = dict(system.step())
    return calls_to_text(log.calls), {name: digest(gradient) for name, gradient in seen.items()}


def blamed(reference: list[Log], candidate: list[Log]) -> Culprit | None:
    differing = {
        rank: [(right[1][name], seen) for name, seen in wrong[1].items() if right[1][name] != seen]
        for rank, (right, wrong) in enumerate(zip(reference, candidate, strict=True))
    }
    assert any(differing.values()), "the defect changes nothing"
    logs = [[calls_from_text(text, "log") for text, _ in side] for side in (reference, candidate)]
    return find_culprit(*logs, differing)


class Eager:
    """Two linear layers, by eager autograd."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 4, bias=False))
        self.x = torch.randn(2, 4)

    def compute(self, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        names = [name for name, _ in self.model.named_parameters()]
        loss = functional_call(self.model, dict(zip(names, parameters, strict=True)), (x,)).square().mean()
        return torch.autograd.grad(loss, parameters)

    def step(self) -> Iterator[tuple[str, Tensor]]:
        for (name, _), gradient in zip(self.model.named_parameters(), self.run(), strict=True):
            yield name, gradient

    def run(self) -> tuple[Tensor, ...]:
        return self.compute(self.x, *self.model.parameters())


class Traced(Eager):
    """The same by a graph of its own, whose backward rounds what enters gelu's."""

    def __init__(self) -> None:
        super().__init__()
        self.own = make_fx(self.compute)(self.x, *(p.detach().requires_grad_() for p in self.model.parameters()))
        [bad] = [n.args[0] for n in self.own.graph.nodes if n.target is aten.gelu_backward.default]
        with self.own.graph.inserting_after(bad):
            low = self.own.graph.call_function(aten._to_copy.default, (bad,), {"dtype": torch.bfloat16})
        with self.own.graph.inserting_after(low):
            high = self.own.graph.call_function(aten._to_copy.default, (low,), {"dtype": torch.float32})
        bad.replace_all_uses_with(high, delete_user_cb=lambda user: user is not low)
        self.own.recompile()

    def run(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            found: tuple[Tensor, ...] = self.own(self.x, *self.model.parameters())
        return found


def test_a_defect_in_the_backward_of_a_graph_that_is_not_shown_is_found() -> None:
    culprit = blamed([log_of(Eager())], [log_of(Traced())])
    assert culprit is not None
    assert (culprit.how, culprit.call.operator, culprit.call.place.direction) == ("adds", "_to_copy", "backward")


class Reducing:
    """Gradients of two microbatches, reduced and scaled by one foreach call; those of `a` are whole numbers."""

    def __init__(self, mesh: Mesh, *, once: bool) -> None:
        self.once = once
        generator = torch.Generator().manual_seed(mesh.rank)
        self.parts = {name: [torch.randn(64, generator=generator) for _ in range(2)] for name in ("a", "b")}
        self.parts["a"] = [part.round() for part in self.parts["a"]]

    def reduce(self, first: Tensor, second: Tensor) -> Tensor:
        if self.once:
            total = first + second
            dist.all_reduce(total)
            return total
        first, second = first.clone(), second.clone()
        dist.all_reduce(first)
        dist.all_reduce(second)
        return first + second

    def step(self) -> Iterator[tuple[str, Tensor]]:
        gradients = {name: self.reduce(*parts) for name, parts in self.parts.items()}
        torch._foreach_mul_(list(gradients.values()), 0.5)
        yield from gradients.items()


def reduce_twice_and_once(mesh: Mesh) -> list[Any]:
    b = [digest(part) for part in Reducing(mesh, once=True).parts["b"]]
    return [log_of(Reducing(mesh, once=False)), log_of(Reducing(mesh, once=True)), b]


@pytest.mark.ranks
def test_a_foreach_call_does_not_lead_from_a_gradient_that_differs_to_one_that_agrees() -> None:
    answers = on_ranks(Parallelism(world_size=2, ep=1), reduce_twice_and_once)
    culprit = blamed([answer[0] for answer in answers], [answer[1] for answer in answers])
    assert culprit is not None
    assert (culprit.how, culprit.call.operator) == ("lacks", "allreduce_")
    assert culprit.call.inputs[0] in answers[0][2], "it reduces a part of b, whose gradient differs"
