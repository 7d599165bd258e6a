"""What tracing and every pass cost on the way to DeepSeek-V3's 671B parameters.

    python tests/benchmarks/bench_scaling.py [--depths 4,8,16,32,61] [--case transformer_batch] [--ep 64]
        [--flavor 671B] [--tp 8 [--sequence]] [--pp 4]

All published dimensions, 4 sequences of 4,096 tokens, 64 ranks, every optional pass on, values fake: nothing is
allocated or sent. No process group is made, not even a fake one: collectives are traced by their group's name. With
--pp the step is a micro-batch's, and the last row has its cut into stages.
Each depth has a process of its own, so that its peak memory is its own.

Seconds are the process's own on its one thread, so that a busy machine does not blur them; the last line has the
clock's. A pass's include the verification of the graph that it was given. Goals, on 2 cores: seconds a node at 61
layers at most 1.3 times those at 4 (trace over traced nodes, a pass over the nodes it leaves); 61 layers within 6
minutes and 8 GiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures import figure

DEPTHS = (4, 8, 16, 32, 61)
BUDGET_SECONDS = 360
BUDGET_GIB = 8
BUDGET_GROWTH = 1.3
LOGGERS = ("bitproof.harness.graph.tracing.trace", "bitproof.harness.graph.pipeline")


def main() -> int:
    """Measure each depth in a process of its own, print the table; 1 if a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="numbers of layers, 4 or more")
    parser.add_argument("--case", default="transformer_batch", choices=("transformer_batch", "moe_batch", "moe_seq"))
    parser.add_argument("--ep", type=int, default=64, help="ranks among which the experts are spread")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--flavor", default="671B", help="the DeepSeek-V3 flavor that is made deeper")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--sequence", action="store_true", help="they divide the sequence between layers")
    parser.add_argument("--pp", type=int, default=1, help="stages of a pipeline")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options)))
        return 0
    depths = [int(depth) for depth in options.depths.split(",")]
    runs = [in_own_process(depth) for depth in depths]
    for row in rows(runs):
        print(row)
    first, last = (1e6 * run["total"][0] / run["total"][1] for run in (runs[0], runs[-1]))
    is_over = runs[-1]["clock_seconds"] > BUDGET_SECONDS or runs[-1]["total"][2] > BUDGET_GIB
    return figure("bench.scaling", last / first) or int(is_over)


def in_own_process(depth: int) -> dict[str, Any]:
    """One depth's measurement; its progress goes to stderr as it happens."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", str(depth)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def measure(depth: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trace and rewrite one step: seconds, nodes and peak memory so far of each part, and of all of it."""
    import torch

    from bitproof.harness.systems.graph import prepare

    torch.set_num_threads(1)
    case = deep_case(depth, options)
    log = _Progress(depth)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG)
        logging.getLogger(name).addHandler(log)
    start, log.cpu_seconds = time.perf_counter(), [time.process_time()]
    program = prepare(case, torch.device("cpu"))
    clock_seconds = time.perf_counter() - start
    log.note()
    names = ["trace", *(report.name for report in program.passes), "verify, code"]
    nodes = [program.passes[0].nodes_before, *(report.nodes_after for report in program.passes)]
    seconds = [later - earlier for earlier, later in itertools.pairwise(log.cpu_seconds)]
    parts = zip(names, zip(seconds, [*nodes, nodes[-1]], log.peaks_gib, strict=True), strict=True)
    total = sum(seconds), nodes[-1], peak_gib()
    return {"depth": depth, "parts": dict(parts), "total": total, "clock_seconds": clock_seconds}


def deep_case(depth: int, options: argparse.Namespace) -> Any:
    """The chosen case over the flavor with `depth` layers, on 64 ranks, with every pass."""
    from bitproof.builtin_cases.chunking import CASES
    from bitproof.harness.case import Batch, Memory, Model, Parallelism, Pipeline, Schedule
    from bitproof.reference import models
    from bitproof.reference.models.deepseek_v3 import FLAVORS

    flavors = dict(FLAVORS) | {"deep": replace(FLAVORS[options.flavor], num_layers=depth)}
    models.FAMILIES["deep"] = models.FAMILIES["deepseek_v3"]._replace(flavors=flavors)
    tp, pp = options.tp, options.pp
    ep = min(options.ep, 64 // pp, FLAVORS[options.flavor].moe.routing.num_experts)
    parallelism = Parallelism(world_size=64, ep=ep, tp=tp, pp=pp, sequence=options.sequence, shared_groups=pp == 1)
    is_small = options.flavor in ("tiny", "debugmodel")
    return replace(
        next(case for case in CASES if case.name == options.case),
        model=Model(family="deep", flavor="deep"),
        parallelism=parallelism,
        batch=Batch(sequences=4 * (4 if pp > 1 else 1), seq_len=256 if is_small else 4096),
        schedule=Schedule() if pp > 1 else None,
        memory=Memory(policy="selective"),
        pipeline=Pipeline(isolate_groups=True, bucket=True, overlap=True),
    )


class _Progress(logging.Handler):
    """Prints what the pipeline logs, a line after the trace and each pass; notes seconds and peak memory there."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.start = time.perf_counter()
        self.peaks_gib: list[float] = []
        self.cpu_seconds: list[float] = []

    def note(self) -> None:
        self.peaks_gib.append(peak_gib())
        self.cpu_seconds.append(time.process_time())

    def emit(self, record: logging.LogRecord) -> None:
        self.note()
        elapsed = time.perf_counter() - self.start
        line = f"[{elapsed:6.1f} s, {peak_gib():.2f} GiB] {self.depth} layers: {record.getMessage()}"
        print(line, file=sys.stderr, flush=True)


def peak_gib() -> float:
    """The most memory this process has had resident so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def rows(runs: list[dict[str, Any]]) -> Iterator[str]:
    """The table, a line at a time: seconds, microseconds a node, and how those grew since the smallest depth."""
    depths = "".join(f"{run['depth']:>10}" for run in runs)
    yield f"{'layers':29}{depths}"
    for name in [*runs[0]["parts"], "total"]:
        seconds, nodes, gib = zip(*(run["parts"].get(name, run["total"]) for run in runs), strict=True)
        per_node = [1e6 * s / n for s, n in zip(seconds, nodes, strict=True)]
        growth = per_node[-1] / per_node[0]
        note = f"  over {BUDGET_GROWTH}" if growth > BUDGET_GROWTH else ""
        yield f"{f'{name}, s':29}" + "".join(f"{s:10.2f}" for s in seconds)
        yield f"{'  nodes':29}" + "".join(f"{n:10}" for n in nodes)
        yield f"{'  us a node':29}" + "".join(f"{x:10.1f}" for x in per_node) + f"   grew {growth:.2f}{note}"
        yield f"{'  peak so far, GiB':29}" + "".join(f"{g:10.2f}" for g in gib)
    seconds, (_, _, gib) = runs[-1]["clock_seconds"], runs[-1]["total"]
    within = "within" if seconds <= BUDGET_SECONDS and gib <= BUDGET_GIB else "OVER"
    budget = f"{BUDGET_SECONDS} s and {BUDGET_GIB} GiB"
    yield f"{runs[-1]['depth']} layers: {seconds:.0f} s by the clock, {gib:.2f} GiB: {within} {budget}"


if __name__ == "__main__":
    sys.exit(main())
