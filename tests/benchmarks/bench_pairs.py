"""What a proof of two programs costs by their calls: `python tests/benchmarks/bench_pairs.py [NODES ...]`.

By default 10, 1,000 and 100,000 calls each: chains of products, sums and roots, the one with operands exchanged. Each
has a process of its own, so that its peak memory is its own; seconds are of its CPU. Returns 1 where one is not PROVED.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures import figure


def chain(nodes: int, turned: bool) -> torch.fx.GraphModule:
    """So many calls, one after the other, with the operands of each product and sum in one order or the other."""
    graph = torch.fx.Graph()
    x = y = graph.placeholder("x")
    w = graph.placeholder("w")
    for place in range(nodes):
        match place % 3:
            case 0:
                y = graph.call_function(torch.ops.aten.mul.Tensor, (w, y) if turned else (y, w))
            case 1:
                y = graph.call_function(torch.ops.aten.add.Tensor, (x, y) if turned else (y, x))
            case 2:
                y = graph.call_function(torch.ops.aten.tanh.default, (y,))
    graph.output((y,))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def measure(nodes: int) -> dict[str, float | str]:
    """One pair, in this process."""
    import bitproof

    pair = [chain(nodes, turned) for turned in (False, True)]
    inputs: list[Tensor] = [torch.randn(4, 6), torch.randn(4, 6)]
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = bitproof.prove(*pair, *inputs)
    seconds, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"verdict": found.verdict, "seconds": seconds, "GiB": after / 2**20, "before": before / 2**20}


def main(sizes: list[int]) -> int:
    """Measure each in a process of its own, print a line, return 1 where one is not PROVED."""
    failed, micros = 0, math.inf
    for nodes in sizes:
        command = [sys.executable, __file__, "--measure", str(nodes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        micros = 1e6 * row["seconds"] / nodes / 2
        print(
            f"{nodes} calls each: {row['verdict']}, {row['seconds']:.1f} s ({micros:.0f} us a call), "
            f"{row['GiB']:.2f} GiB, {row['before']:.2f} of them before",
            flush=True,
        )
        failed += row["verdict"] != "PROVED"
    return figure("bench.pairs", micros) or int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(int(sys.argv[2]))))
    else:
        sys.exit(main([int(text) for text in sys.argv[1:]] or [10, 1_000, 100_000]))
