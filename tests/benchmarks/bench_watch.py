"""What recording with `bitproof.watch` costs a trainer of 100 million parameters under FSDP2, on two CPU ranks.

    python -m tests.benchmarks.bench_watch [TOKENS...]

Budget: 3 % of a step, with 1,024 tokens a rank and step. Steps with and without recording are taken in turns: what
counts is the median of what each pair gives by the clock. The CPU seconds of rank 0 are less noisy, and printed beside.
A step of fewer tokens takes less time, and recording does not.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import bitproof
from bitproof.harness.capture.recorder import Recorder
from bitproof.reference.parallel.mesh import Mesh
from tests.figures import figure
from tests.ranks import on_ranks

VOCABULARY, DIM, HEADS, LAYERS, SEQUENCE = 20_000, 768, 12, 12, 128
WARM_UP, PAIRS = 1, 12


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's input plus attention, plus an MLP of both."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape_as(x)
        x = x + self.out(attended)
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return y


class Model(nn.Module):
    """Predicts each token from those before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = x @ self.embedding.weight.T
        return logits


def trainer(case: bitproof.Case, mesh: Any) -> Any:
    """The trainer, as a system."""
    model = Model()
    for module in (*model.blocks, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.Generator().manual_seed(mesh.rank)

    def step(index: int) -> Tensor:
        tokens = torch.randint(VOCABULARY, (case.batch.sequences, SEQUENCE + 1), generator=data)
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watched: Any = bitproof.watch(step, model=model, optimizer=optimizer)
    watched.plain = step
    return watched


def seconds_of(mesh: Mesh, tokens: int) -> dict[str, list[tuple[float, float]]]:
    """On one rank, how long steps took without and with recording, in turns: by the clock, and of its CPUs.

    Of a step with recording, how long the recorder took, twice.
    """
    case = bitproof.Case(
        name="watched",
        family="bench",
        reference="mine:trainer",
        parallelism=mesh.parallelism,
        batch=bitproof.Batch(sequences=tokens // SEQUENCE),
    )
    watched, recorder = trainer(case, mesh), Recorder(mesh.rank)
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "watched": [], "recording": []}
    for index in range(2 * (WARM_UP + PAIRS)):
        dist.barrier()
        recorder.step, before, began, worked = index, recorder.seconds, time.perf_counter(), time.process_time()
        if index % 2:
            watched.step(index, recorder.observe)
        else:
            watched.plain(index)
        worked = time.process_time() - worked
        dist.barrier()  # the next step waits for the slower rank
        if index >= 2 * WARM_UP:
            found["watched" if index % 2 else "plain"].append((time.perf_counter() - began, worked))
            found["recording"] += [(recorder.seconds - before,) * 2] * (index % 2)
    return found


def share(tokens: int) -> float:
    """By how much recording makes a step longer by the clock, printed with what it is made of: medians on rank 0."""
    parallelism = bitproof.Parallelism(world_size=2, ep=1)
    found = on_ranks(parallelism, lambda mesh: seconds_of(mesh, tokens))[0]
    ratios = []
    for place, what in enumerate(("by the clock", "of rank 0's CPUs")):
        plain, watched = ([pair[place] for pair in found[name]] for name in ("plain", "watched"))
        pairs = [b / a - 1 for a, b in zip(plain, watched, strict=True)]
        ratios.append(statistics.median(pairs))
        text = f"{statistics.median(plain):.2f} s, watched {statistics.median(watched):.2f} s {what}"
        print(f"{tokens} tokens: a step takes {text}: {ratios[-1]:+.1%}, the median of", *(f"{x:+.1%}" for x in pairs))
    recording = statistics.median(pair[0] for pair in found["recording"])
    print(f"the recorder took {recording:.3f} s, {recording / statistics.median(p for p, _ in found['watched']):.1%}")
    return ratios[0]


def main(*tokens: str) -> int:
    """Measure; returns 1 if 1,024 tokens miss the goal."""
    parameters = sum(p.numel() for p in Model().parameters())
    print(f"{parameters / 1e6:.1f} million parameters, 2 ranks, float32, torch {torch.__version__}", flush=True)
    shares = {int(each): share(int(each)) for each in tokens or ("1024",)}
    return figure("bench.watch", shares[1024]) if 1024 in shares else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
