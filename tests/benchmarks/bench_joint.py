"""What exporting a step as a joint graph, dividing it and rewriting it cost: seconds, MiB, microseconds a node.

    python tests/benchmarks/bench_joint.py [--sizes tiny,debug,671B-4,671B-8]

    tiny    Llama 3 tiny, 4 x tp 2           debug    DeepSeek-V3's debug model, ep 4, both on 8 ranks
    671B-N  DeepSeek-V3 671B with N of its 61 layers, 3 of them dense, 4 x 4,096 tokens, ep 64 on 64 ranks

Values are fake and no process group is made. Each size has a process of its own, so that its peak memory is its own.
Seconds are the process's own on its one thread, so that a busy machine does not blur them; importing torch's exporter
is left out of them, and told apart. Microseconds are of nodes that a part leaves; an export's of nodes that it made.
"""

from __future__ import annotations

import argparse
import json
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

SIZES = ("tiny", "debug", "671B-4", "671B-8")


def main() -> int:
    """Measure each size in a process of its own, print its table; 1 if the figure misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    micros = []
    for size in options.sizes.split(","):
        command = [sys.executable, __file__, "--measure", size]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        for row in rows(found):
            print(row, flush=True)
        _, seconds, nodes, _ = found["parts"][-1]  # all passes
        micros.append(seconds / nodes)
    return figure("bench.joint", micros[-1] / micros[0])


def case_of(size: str) -> Any:
    """The case of a size, every pass on that a joint case may ask for."""
    from bitproof.builtin_cases import CASES
    from bitproof.harness.case import Batch, Memory, Model, Parallelism

    if size == "tiny":
        return replace(CASES["joint_llama3_fsdp4_tp2"], memory=Memory(policy="selective"))
    case = replace(CASES["joint_deepseek_ep4"], memory=Memory(policy="selective"))
    if size == "debug":
        return replace(case, model=Model(flavor="debugmodel"))
    return replace(
        case,
        model=Model(flavor="671B", layers=int(size.removeprefix("671B-")), dense_layers=3),
        parallelism=Parallelism(world_size=64, ep=64),
        batch=Batch(sequences=4, seq_len=4096),
    )


def measure(size: str) -> dict[str, Any]:
    """Seconds, nodes and peak memory so far of each part, and what the cut came to."""
    import torch

    from bitproof.harness.machine.determinism import set_determinism
    from bitproof.harness.systems.graph import finish, trace

    torch.set_num_threads(1)
    case, cpu = case_of(size), torch.device("cpu")
    set_determinism(case.seed)
    start = time.process_time()
    import torch._functorch.partitioners
    import torch._inductor.pattern_matcher

    loaded = time.process_time()
    traced = trace(case, cpu, system="joint")
    num_nodes = len(traced.joint.module.graph.nodes)
    parts: list[Any] = [["export", time.process_time() - loaded, num_nodes, peak_mib()]]
    print(f"{size}: exported, {num_nodes} nodes, {parts[0][1]:.1f} s", file=sys.stderr, flush=True)
    began, entered = time.process_time(), [time.process_time()]
    peaks: list[float] = []

    def enter(place: str) -> None:
        entered.append(time.process_time())
        peaks.append(peak_mib())
        print(f"{size}: {place} after {entered[-1] - began:.1f} s", file=sys.stderr, flush=True)

    program = finish(traced, case, cpu, enter=enter)
    ends = [*entered[2:], time.process_time()]
    for report, first, last, peak in zip(program.passes, entered[1:], ends, [*peaks[1:], peak_mib()], strict=True):
        parts.append([report.name, last - first, report.nodes_after, peak])
    parts.append(["all passes", time.process_time() - began, parts[-1][2], peak_mib()])
    cut = next(report.facts for report in program.passes if report.name == "partition")
    return {"size": size, "imports": loaded - start, "parts": parts, "cut": cut}


def peak_mib() -> float:
    """The most memory this process has had resident so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def rows(found: dict[str, Any]) -> Iterator[str]:
    """One size's table, a line at a time."""
    cut = found["cut"]
    yield f"{found['size']}: {found['imports']:.1f} s of imports"
    yield f"  {'part':20}{'s':>9}{'nodes':>8}{'us/node':>9}{'peak MiB':>10}"
    for name, seconds, nodes, peak in found["parts"]:
        yield f"  {name:20}{seconds:9.2f}{nodes:8}{1e6 * seconds / nodes:9.0f}{peak:10.0f}"
    yield (
        f"  {cut['nodes_joint']} nodes -> forward {cut['nodes_forward']}, backward {cut['nodes_backward']}; "
        f"{cut['saved_bytes'] / 2**20:.2f} of {cut['uncut_bytes'] / 2**20:.2f} MiB saved, "
        f"{cut['recomputed']} calls computed again"
    )


if __name__ == "__main__":
    sys.exit(main())
