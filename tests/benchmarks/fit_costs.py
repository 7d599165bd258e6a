"""Fit the overlap pass's cost model to this machine: `python tests/benchmarks/fit_costs.py OUT.json`.

Eight gloo ranks run the chunked training step of several cases node by node, all ranks at once, as in a
real step. Before each collective they meet at a barrier; its launch is timed, and how long after that
it has arrived. Every node's time is the median over runs and ranks; every kind of node gets a line.

The file that comes with bitproof is harness/graph/passes/overlap/cpu_gloo_8_ranks.json. With `--add` the lines that a
file has stay as they are, and those that it lacks are added, from steps whose layers are split over tensor groups.
Another is used by naming it in a case: `Pipeline(overlap=True, overlap_costs="OUT.json")`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.fx import Interpreter, Node

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.case import Batch, Case, Model, Parallelism
from bitproof.harness.graph import operators
from bitproof.harness.graph.passes.overlap.costs import CostModel, NodeWork, fit, launching, work_of
from bitproof.harness.machine.describe import describe_machine
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.processes.process import keep_to_one_core
from bitproof.harness.step.storages import Storages
from bitproof.harness.systems.graph import prepare
from bitproof.harness.systems.graph_program import GraphProgram, make_graph_system
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.parallel.mesh import GROUP_NAMES, Mesh
from bitproof.reference.step import Trainer
from tests.ranks import on_ranks

CPU = torch.device("cpu")
RUNS = 3
WARM_UP = 1
EXPERT_RANKS = (2, 4, 8)
TENSOR_RANKS = (2, 4)
SIZES = (("tiny", 32), ("debugmodel", 64))

Timed = tuple[NodeWork, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--add", action="store_true", help="only add the lines that OUT lacks, from steps with tensor groups"
    )
    options = parser.parse_args()
    measured = tensor_cases(options.ranks) if options.add else cases(options.ranks)
    points = [point for case in measured for point in measure(case)]
    machine = {name: value for name, value in describe_machine().items() if name not in ("bitproof", "gpu_models")}
    model = fit(points, {"device": "cpu", "backend": "gloo", "ranks": options.ranks, **machine})
    if options.add:
        known = CostModel.load(options.out)
        model = CostModel(known.description, dict(sorted({**model.lines, **known.lines}.items())))
    model.save(options.out)
    print(tabulate(rows(model), headers="keys", floatfmt=("", ".1f", ".4f", "", ".3f", ".0%")))


def cases(ranks: int) -> Iterator[Case]:
    """Sizes and group sizes over which the lines are fitted."""
    for ep in (ep for ep in EXPERT_RANKS if ranks % ep == 0):
        for flavor, seq_len in SIZES:
            parallelism = Parallelism(world_size=ranks, ep=ep)
            model, batch = Model(flavor=flavor), Batch(seq_len=seq_len)
            yield replace(transformer_batch, parallelism=parallelism, model=model, batch=batch)


def tensor_cases(ranks: int) -> Iterator[Case]:
    """Steps whose layers are split over tensor groups of several sizes: their sums are all-reduces."""
    for tp in (tp for tp in TENSOR_RANKS if ranks % tp == 0):
        for flavor, seq_len in SIZES:
            parallelism, batch = Parallelism(world_size=ranks, ep=2, tp=tp), Batch(seq_len=seq_len)
            yield replace(transformer_batch, parallelism=parallelism, model=Model(flavor=flavor), batch=batch)


def measure(case: Case) -> list[Timed]:
    """A point for every call of the case's step, and one more, its launch, for each collective."""
    program = prepare(case, CPU)
    storages = Storages(program.module.graph.nodes)

    def body(mesh: Mesh) -> list[list[Any]]:
        keep_to_one_core(mesh.rank, mesh.parallelism.world_size)
        set_determinism(case.seed)
        arguments = arguments_of(case, mesh, program)
        runs = []
        for _ in range(WARM_UP + RUNS):
            timing = Timing(program.module, storages, {name: mesh.size(name) for name in GROUP_NAMES})
            with torch.no_grad():
                timing.run(*arguments)
            runs.append(timing.points)
        per_node = zip(*runs[WARM_UP:], strict=True)
        return [[*node[0][0], statistics.median(seconds for _, seconds in node)] for node in per_node]

    per_node = zip(*on_ranks(case.parallelism, body), strict=True)
    median = statistics.median
    return [
        (NodeWork(ranks[0][0], median(amount for _, amount, _ in ranks)), median(seconds for *_, seconds in ranks))
        for ranks in per_node
    ]


def arguments_of(case: Case, mesh: Mesh, program: GraphProgram) -> list[torch.Tensor]:
    """What the program is called with in the first step of a run on this rank."""
    trainer: Trainer = make_graph_system(case, mesh, CPU, program, lambda gradients: gradients)
    buffers = dict(trainer.model.named_buffers())
    state = [trainer.parameters[name].detach() for name in program.parameter_names]
    return [*state, *(buffers[name] for name in program.buffer_names), *StepInputs(*trainer.data.step(0))]


class Timing(Interpreter):
    """Runs a graph node by node and keeps each call's work, told from real sizes, and its seconds."""

    def __init__(self, module: torch.fx.GraphModule, storages: Storages, group_sizes: dict[str, int]) -> None:
        super().__init__(module)
        self.storages = storages
        self.group_sizes = group_sizes
        self.points: list[Timed] = []

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function" or operators.is_wait(n):
            return super().run_node(n)
        if operators.is_collective(n):
            dist.barrier()
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        assert callable(n.target)
        start = time.perf_counter()
        result = n.target(*args, **kwargs)
        returned = time.perf_counter()
        values = {**self.env, n: result}
        work = work_of(n, self.storages.is_view(n), values.__getitem__, group_sizes=self.group_sizes)
        if operators.is_collective(n):
            self.points.append((launching(work), returned - start))
            torch.ops._c10d_functional.wait_tensor(result)
            self.points.append((work, time.perf_counter() - returned))
        else:
            self.points.append((work, returned - start))
        return result


def rows(model: CostModel) -> list[dict[str, Any]]:
    """How well each line fits."""
    return [
        {
            "kind": kind,
            "fixed us": line.fixed * 1e6,
            "ns per unit": line.per_unit * 1e9,
            "points": line.points,
            "R^2": line.r2,
            "median relative error": line.median_relative_error,
        }
        for kind, line in model.lines.items()
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
