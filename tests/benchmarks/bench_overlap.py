"""Does the overlap pass do what its cost model says? `python tests/benchmarks/bench_overlap.py [--world-size N]`.

Real gloo ranks run each case's step with and without the pass, taking turns, and must get the same
bits. Printed for both orders: seconds in which a rank stood at the waits of all-to-alls, by direction,
and of a step, as the model predicts them and as measured (median over steps of the mean over ranks).

Two things the model leaves out show here. Ranks are not in step: a wait also waits for the peer to get
there. And where ranks outnumber cores, a rank that stands still lends its core to another, so that
hiding saves less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.fx import GraphModule

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.builtin_cases.passes.overlap import CASES
from bitproof.harness.case import Case
from bitproof.harness.graph import operators
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.passes.overlap.timeline import is_exchange
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.processes.process import keep_to_one_core
from bitproof.harness.systems.graph import GraphProgram, prepare
from bitproof.reference.parallel.mesh import Mesh
from tests.benchmarks.fit_costs import CPU, arguments_of
from tests.harness.graph.graphs import bits
from tests.ranks import on_ranks

STEPS = 7
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=8)
    options = parser.parse_args()
    for case in CASES:
        parallelism = replace(case.parallelism, world_size=options.world_size)
        print(f"{case.name}, {options.world_size} ranks")
        print(tabulate(measure(replace(case, parallelism=parallelism)), headers="keys", floatfmt=".1f"), flush=True)


def measure(case: Case) -> list[dict[str, Any]]:
    """A row for each order: milliseconds predicted and measured."""
    plain = replace(case, pipeline=replace(case.pipeline, overlap=False))
    programs = {"as chunked": prepare(plain, CPU), "overlapped": prepare(case, CPU)}
    facts = next(entry["facts"] for entry in programs["overlapped"].passes if entry["name"] == "overlap")
    answers = on_ranks(case.parallelism, lambda mesh: run(case, mesh, programs))
    return [
        {"order": name} | row(facts[moment], [answer[name] for answer in answers])
        for name, moment in zip(programs, ("before", "after"), strict=True)
    ]


def row(predicted: dict[str, Any], ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """`ranks` holds each rank's steps."""

    def measured(what: str) -> float:
        steps = zip(*ranks, strict=True)
        return statistics.median(statistics.fmean(rank.get(what, 0.0) for rank in step) for step in steps)

    columns = {f"{way} blocked": (predicted[way]["blocked_seconds"], measured(way)) for way in ("forward", "backward")}
    columns |= {"step": (predicted["step_seconds"], measured("step"))}
    columns["in flight, model"] = (sum(predicted[way]["all_to_all_seconds"] for way in ("forward", "backward")),)
    columns["hidden, model"] = (sum(predicted[way]["hidden_seconds"] for way in ("forward", "backward")),)
    return {
        f"{what} {kind}".strip() + " ms": value * 1e3
        for what, values in columns.items()
        for kind, value in zip(("model", "real") if len(values) == 2 else ("",), values, strict=True)
    }


def run(case: Case, mesh: Mesh, programs: dict[str, GraphProgram]) -> dict[str, list[dict[str, float]]]:
    """On one rank: what each step of each program took. Programs take turns; their bits must agree."""
    keep_to_one_core(mesh.rank, mesh.parallelism.world_size)
    set_determinism(case.seed)
    seconds: Counter[str] = Counter()
    timed = {name: with_timed_waits(program.module, seconds) for name, program in programs.items()}
    arguments = arguments_of(case, mesh, next(iter(programs.values())))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for step in range(WARM_UP + STEPS):
        results = {}
        for name, module in timed.items():
            copies = [x.clone() for x in arguments]
            torch.distributed.barrier()
            seconds.clear()
            start = time.perf_counter()
            with torch.no_grad():
                outputs = module(*copies)
            seconds["step"] = time.perf_counter() - start  # type: ignore[assignment]
            results[name] = [bits(x) for x in (*outputs, *copies)]
            if step >= WARM_UP:
                found[name].append(dict(seconds))
        first, second = results.values()
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), "the order changed bits"
    return found


def with_timed_waits(module: GraphModule, seconds: Counter[str]) -> GraphModule:
    """The same program; all-to-alls' waits add the time they take to `seconds`, by direction."""
    copy = GraphModule(module, module.graph.__deepcopy__({}))
    for node in copy.graph.nodes:
        if operators.is_wait(node) and is_exchange(operators.launch_of(node)):
            node.target = timed_wait(seconds, origin_of(operators.launch_of(node)).direction)
    copy.recompile()
    return copy


def timed_wait(seconds: Counter[str], direction: str) -> Callable[[Tensor], Tensor]:
    def wait(x: Tensor) -> Tensor:
        start = time.perf_counter()
        result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
        seconds[direction] += time.perf_counter() - start  # type: ignore[assignment]
        return result

    wait.__name__ = f"wait_{direction}"
    return wait


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
