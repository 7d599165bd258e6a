"""What bucketing gives: `python tests/benchmarks/bench_bucketing.py [--plain-gloo] [--steps N] [--rounds N]`.

Eight forked ranks take the same steps with and without bucketing, in turns, so that both see the same
machine. Step times are medians over steps of rank 0: of the graph alone, and of the trainer's whole step
with data, optimizer and the digest of every tensor. `--plain-gloo` takes gloo's own collectives, of 10
to 16 ms each, instead of the rank-order group that runs use; its sums depend on sizes, so bits may differ.

Budget: a bucketed step is at least 3 times faster on gloo's own collectives, where each costs most, and
has the same bits on rank-order groups, where "same bits" compares every recorded tensor of all ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tabulate import tabulate

from bitproof.builtin_cases import CASES
from bitproof.builtin_cases.chunking import variant
from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.case import Pipeline
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.systems.graph import GraphProgram, make_graph_system, prepare
from bitproof.reference.parallel import mesh as meshes
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import Trainer
from tests.ranks import on_ranks

NAMES = ("transformer_batch", "moe_batch", "moe_seq")
CPU = torch.device("cpu")
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain-gloo", action="store_true", help="gloo's own collectives, not the rank-order group")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each kind in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("names", nargs="*", default=NAMES)
    options = parser.parse_args()
    if options.plain_gloo:
        meshes.RankOrderGroup = lambda group: group  # type: ignore[assignment, misc]
    torch.set_num_threads(1)
    set_determinism(0)
    rows = [measure(name, options.steps, options.rounds) for name in options.names]
    print("plain gloo" if options.plain_gloo else "rank-order groups on gloo")
    print(tabulate(rows, headers="keys", floatfmt=".3f"))


def measure(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """One case's row: seconds of a step, and collectives in its graph, without and with bucketing."""
    bucketed = variant(CASES[name], "bucketed", "bucketing", pipeline=Pipeline(bucket=True))
    programs = {case.name: (case, prepare(case, CPU)) for case in (CASES[name], bucketed)}

    def body(mesh: Mesh) -> dict[str, Any]:
        systems = {
            label: make_graph_system(case, mesh, CPU, program, lambda gradients: gradients)
            for label, (case, program) in programs.items()
        }
        seconds: dict[str, list[list[float]]] = {label: [] for label in systems}
        recorders = {label: Recorder(mesh.rank) for label in systems}
        for _ in range(rounds):
            for label, system in systems.items():
                for i in range(WARM_UP + steps):
                    took = timed_step(system, recorders[label])
                    seconds[label] += [took] if i >= WARM_UP else []
        digests = [{str(key): str(row) for key, row in recorder.rows.items()} for recorder in recorders.values()]
        return {"seconds": seconds, "same": digests[0] == digests[1] and bool(digests[0])}

    answers = on_ranks(CASES[name].parallelism, body)
    before, after = ([statistics.median(x) for x in zip(*s, strict=True)] for s in answers[0]["seconds"].values())
    counts = [num_collectives(program) for _, program in programs.values()]
    return {
        "case": name,
        "collectives": f"{counts[0]} -> {counts[1]}",
        "graph s": before[0],
        "bucketed": after[0],
        "ratio": before[0] / after[0],
        "step s": before[1],
        "bucketed ": after[1],
        "ratio ": before[1] / after[1],
        "same bits": all(answer["same"] for answer in answers),
    }


def timed_step(system: Trainer, recorder: Recorder) -> list[float]:
    """Take the next step; seconds of its graph, and of all of it."""
    graph = []
    gradients = system.gradients

    def timed(inputs: Any) -> Any:
        start = time.perf_counter()
        result = gradients(inputs)
        graph.append(time.perf_counter() - start)
        return result

    system.gradients = timed
    start = time.perf_counter()
    recorder.step += 1
    system.step(recorder.step, recorder.observe)
    seconds = time.perf_counter() - start
    system.gradients = gradients
    return [graph[0], seconds]


def num_collectives(program: GraphProgram) -> int:
    """All-gathers, reduce-scatters and all-to-alls of one step's graph."""
    launches = Counter(str(node.target).split(".")[0] for node in program.module.graph.nodes)
    waits = sum("wait_tensor" in str(node.target) for node in program.module.graph.nodes)
    return launches["_c10d_functional"] - waits


if __name__ == "__main__":
    main()
