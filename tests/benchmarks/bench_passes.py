"""What chunking and concretizing cost, over a model's depth: `python tests/benchmarks/bench_passes.py`.

Budget: chunk and concretize together take at most 0.5 s for 3 layers, and microseconds per output node
stay flat from 3 to 24 layers.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness.case import Case, Chunking, Model, Parallelism
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.passes.chunk import chunk
from bitproof.harness.graph.passes.clean_up import clean_up
from bitproof.harness.graph.passes.concretize_symbols import concretize_symbols
from bitproof.harness.graph.pipeline import run_pipeline
from bitproof.harness.graph.tracing.trace import JointGraph, trace_joint_step
from bitproof.reference import models
from bitproof.reference.loss import cross_entropy
from bitproof.reference.models.deepseek_v3 import FLAVORS
from bitproof.reference.parallel.mesh import EXPERT, Mesh
from bitproof.reference.step import build_sharded_model
from tests.figures import figure

DEPTHS = (3, 6, 12, 24)
RUNS = 5
CHUNKINGS = (
    Chunking(dim="batch", modules="layers.*"),
    Chunking(dim="batch", modules="layers.*", early_grad_accumulation=True),
    Chunking(dim="seq", modules="layers.*.moe"),
)


@functools.cache
def trace(num_layers: int, dim: Literal["batch", "seq"]) -> JointGraph:
    """The tiny model's step, `num_layers` deep."""
    flavors = dict(FLAVORS) | {"deep": replace(FLAVORS["tiny"], num_layers=num_layers)}
    models.FAMILIES["deep"] = models.FAMILIES["deepseek_v3"]._replace(flavors=flavors)
    case = Case(
        name="bench",
        family="bench",
        reference="eager",
        model=Model(family="deep", flavor="deep"),
        parallelism=Parallelism(world_size=8, ep=2),
    )
    model = build_sharded_model(case, Mesh(0, case.parallelism), torch.device("meta"))
    shape = (case.batch.sequences, case.batch.seq_len)
    inputs = [torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(3)]

    def loss_function(tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor) -> Tensor:
        return cross_entropy(model(tokens_BS, positions_BS), labels_BS)

    chunk_dim = ("batch", "seq").index(dim)
    return trace_joint_step(
        model, loss_function, inputs, chunk_dim=chunk_dim, gradient_seed=1 / 8, device=torch.device("cpu")
    )


def measure(num_layers: int, chunking: Chunking) -> tuple[float, float, int]:
    """Median seconds of each pass, and how many nodes they leave."""
    joint = trace(num_layers, chunking.dim)
    context = PassContext(
        chunk_symbol=joint.chunk_symbol,
        chunking=chunking,
        chunk_groups=frozenset({EXPERT}),
        guards=tuple(joint.guards),
        module_calls=joint.module_calls,
    )
    source = clean_up(joint.module, context)
    runs = [run_pipeline(source, [chunk, concretize_symbols], context)[1] for _ in range(RUNS + 1)][1:]
    chunk_seconds, concretize_seconds = (statistics.median(run[i].seconds for run in runs) for i in (0, 1))
    return chunk_seconds, concretize_seconds, runs[0][1].nodes_after


def rows(slowest: list[float]) -> Iterator[str]:
    """The table, a line at a time; adds to `slowest` the seconds of each chunking at the fewest layers."""
    counts = f"{'layers':>6}{'chunk s':>10}{'concretize s':>14}{'both s':>9}{'nodes':>8}{'us/node':>9}"
    yield f"{'modules':14}{'dim':7}{'early':7}" + counts
    for chunking in CHUNKINGS:
        early = "on" if chunking.early_grad_accumulation else "off"
        for depth in DEPTHS:
            first, second, nodes = measure(depth, chunking)
            both = first + second
            slowest += [both] * (depth == min(DEPTHS))
            yield (
                f"{chunking.modules:14}{chunking.dim:7}{early:7}{depth:6}{first:10.3f}{second:14.3f}"
                f"{both:9.3f}{nodes:8}{both / nodes * 1e6:9.0f}"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    seconds: list[float] = []
    for row in rows(seconds):
        print(row, flush=True)
    sys.exit(figure("bench.passes", max(seconds)))
