"""torch's pipeline schedules, and the same model without a pipeline, as systems with the same text and micro-batches.

    bitproof run -k schedules

    gpipe, one_f_one_b                        one stage per rank, the loss on the last rank
    interleaved, looped_bfs, zero_bubble      two stages per rank
    unstaged                                  a single rank, micro-batch after micro-batch
    whole                                     a single rank, all rows at once

A layer has the same name on every rank. Its gradients are added from the first micro-batch to the last; `looped_bfs`
adds from the last to the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

import bitproof

if TYPE_CHECKING:
    from bitproof import Case, Mesh

LAYERS, DIM, ROWS, PARTS = 16, 16, 8, 4
"""Default sizes, which the case's options `layers`, `dim` and `rows` override. PARTS is the number of micro-batches."""


class StagedRun:
    """A training run on this rank: its layers, their optimizer, and the data. Every rank draws the whole batch.

    `numbers` are the indices of this rank's layers.
    """

    def __init__(self, case: Case, numbers: list[int]) -> None:
        self.dim, self.rows = case.options.get("dim", DIM), case.options.get("rows", ROWS)
        # All ranks make all layers, so that a layer's initial values do not depend on its rank.
        layers = [nn.Sequential(nn.Linear(self.dim, self.dim), nn.GELU()) for _ in range(_layers(case))]
        self.layers = {number: layers[number] for number in numbers}
        self.model = nn.ModuleDict({f"layer{number}": layer for number, layer in self.layers.items()})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.data = torch.Generator().manual_seed(case.seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Draw a step's pair of inputs and targets, each (rows, dim)."""
        x = torch.randn(self.rows, self.dim, generator=self.data)
        return x, x.tanh()

    def watched(self, backward: Any) -> Any:
        """Return a system that runs this training, made by `bitproof.watch`.

        `backward(x, target)` must compute the gradients and return the loss, or None on a rank without the loss.
        """

        def step(index: int) -> Tensor | None:
            loss: Tensor | None = backward(*self.batch())
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

        return bitproof.watch(step, model=self.model, optimizer=self.optimizer)


def _layers(case: Case) -> int:
    return int(case.options.get("layers", LAYERS))


def made(case: Case, mesh: Mesh, schedule: Any, per_rank: int = 1) -> Any:
    """Return a system that runs a schedule of torch with `per_rank` stages on each rank.

    For example, with 2 stages on each of 4 ranks, rank 1 has stages 1 and 5.
    """
    ranks = case.parallelism.world_size
    stages, width = per_rank * ranks, _layers(case) // (per_rank * ranks)
    numbers = range(mesh.rank, stages, ranks)
    run = StagedRun(case, [layer for number in numbers for layer in range(number * width, (number + 1) * width)])
    parts = [
        pipelining.PipelineStage(
            nn.Sequential(*(run.layers[layer] for layer in range(number * width, (number + 1) * width))),
            number,
            stages,
            torch.device("cpu"),
        )
        for number in numbers
    ]
    pipeline = schedule(parts if per_rank > 1 else parts[0], PARTS, loss_fn=mse_loss)
    has_first, has_last = 0 in numbers, stages - 1 in numbers

    def backward(x: Tensor, target: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        # Only the first stage takes inputs, and only the last has targets and losses.
        inputs, ends = [x] if has_first else [], {"target": target, "losses": losses} if has_last else {}
        pipeline.step(*inputs, **ends)
        return torch.stack(losses).mean() if has_last else None

    return run.watched(backward)


def gpipe(case: Case, mesh: Mesh) -> Any:
    return made(case, mesh, pipelining.ScheduleGPipe)


def one_f_one_b(case: Case, mesh: Mesh) -> Any:
    """Return a system that runs the backward of each micro-batch as early as possible (1F1B)."""
    return made(case, mesh, pipelining.Schedule1F1B)


def interleaved(case: Case, mesh: Mesh) -> Any:
    return made(case, mesh, pipelining.ScheduleInterleaved1F1B, per_rank=2)


def looped_bfs(case: Case, mesh: Mesh) -> Any:
    """Return a system that runs the forward of all micro-batches, one stage after another, and then their backward.

    Backward takes the micro-batches from the last to the first.
    """
    return made(case, mesh, pipelining.ScheduleLoopedBFS, per_rank=2)


def zero_bubble(case: Case, mesh: Mesh) -> Any:
    """Return a system that computes gradients of weights when a rank would otherwise wait.

    They are computed separately from those of activations.
    """
    return made(case, mesh, pipelining.ScheduleInterleavedZeroBubble, per_rank=2)


def unstaged(case: Case, mesh: Mesh, parts: int = PARTS) -> Any:
    run = StagedRun(case, [*range(_layers(case))])

    def backward(x: Tensor, target: Tensor) -> Tensor:
        losses = []
        for rows, goal in zip(x.chunk(parts), target.chunk(parts), strict=True):
            y = rows
            for layer in run.layers.values():
                y = layer(y)
            losses.append(mse_loss(y, goal))
            losses[-1].backward()
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            # torch's schedules also divide gradients by the number of micro-batches.
            parameter.grad /= parts
        return torch.stack([loss.detach() for loss in losses]).mean()

    return run.watched(backward)


def whole(case: Case, mesh: Mesh) -> Any:
    return unstaged(case, mesh, parts=1)
