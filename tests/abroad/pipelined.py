"""torch's own pipeline schedules: a stage or two on each rank, and the loss on the last one."""

import torch
from torch import nn
from torch.distributed import pipelining

import bitproof

DIM, PARTS = 16, 4


def made(case, mesh, schedule, per_rank=1):
    ranks = case.parallelism.world_size
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(2 * ranks)))
    numbers = [mesh.rank + ranks * turn for turn in range(per_rank)]
    width = 2 // per_rank
    parts = [nn.Sequential(*model[number * width : (number + 1) * width]) for number in numbers]
    stages = [
        pipelining.PipelineStage(part, number, per_rank * ranks, torch.device("cpu"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    has_loss, own = (
        per_rank * ranks - 1 in numbers,
        nn.ModuleDict({f"stage{n}": p for n, p in zip(numbers, parts, strict=True)}),
    )
    run = schedule(stages if per_rank > 1 else stages[0], PARTS, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(0)

    def step(index):
        x, losses = torch.randn(8, DIM, generator=data), []
        run.step(*([x] if 0 in numbers else []), **({"target": x.tanh(), "losses": losses} if has_loss else {}))
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) if has_loss else None

    return bitproof.watch(step, model=own, optimizer=optimizer)


def gpipe(case, mesh):
    return made(case, mesh, pipelining.ScheduleGPipe)


def one_f_one_b(case, mesh):
    return made(case, mesh, pipelining.Schedule1F1B)


def interleaved(case, mesh):
    return made(case, mesh, pipelining.ScheduleInterleaved1F1B, per_rank=2)


def looped_bfs(case, mesh):
    return made(case, mesh, pipelining.ScheduleLoopedBFS, per_rank=2)


def zero_bubble(case, mesh):
    return made(case, mesh, pipelining.ScheduleInterleavedZeroBubble, per_rank=2)
