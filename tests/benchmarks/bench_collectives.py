"""What a collective takes: `python tests/benchmarks/bench_collectives.py [--ranks N] [--seconds S] [--largest BYTES]`.

Forked ranks, on cores as in a run, call each collective over three transports in turns: gloo's own group, the
rank-order group over gloo, and shared memory. Sizes are bytes of what a rank gives (all-gather: its part; the others:
what it sends to all, its own part among it). Times are microseconds, medians of rank 0 over the calls of all turns,
each call waited for on the spot, as in eager code. What the rank-order transports compute is compared bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tabulate import tabulate

from harness.case import Parallelism
from harness.execute.process import keep_to_one_core
from harness.torch_compat import register_group
from reference.parallel.collectives import all_gather, all_to_all, reduce_scatter
from reference.parallel.mesh import FSDP, Mesh
from reference.parallel.rank_order_group import RankOrderGroup
from tests.ranks import on_ranks

OWN, ORDERED, SHARED = "gloo's own", "rank order, gloo", "rank order, shared"
GROUPS = {OWN: "own", ORDERED: "ordered", SHARED: FSDP}
KINDS: dict[str, Callable[[Tensor, int, str], Tensor]] = {
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": lambda x, size, group: all_to_all(x, [len(x) // size] * size, [len(x) // size] * size, group),
}
TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each transport, for a kind and size")
    parser.add_argument("--smallest", type=int, default=64)
    parser.add_argument("--largest", type=int, default=64 << 20)
    options = parser.parse_args()
    sizes = [64 << 2 * i for i in range(11) if options.smallest <= 64 << 2 * i <= options.largest]

    def body(mesh: Mesh) -> list[dict[str, Any]]:
        keep_to_one_core(mesh.rank, options.ranks)
        groups = [dist.new_group(list(range(options.ranks))) for _ in range(2)]
        ordered = RankOrderGroup(groups[1])
        register_group("own", groups[0])
        register_group("ordered", ordered)
        return [measure(kind, size, options.ranks, options.seconds) for kind in KINDS for size in sizes]

    rows = on_ranks(Parallelism(world_size=options.ranks, ep=1), body, collectives="shared")[0]
    print(tabulate(rows, headers="keys", floatfmt=".0f"))


def measure(kind: str, size: int, ranks: int, seconds: float) -> dict[str, Any]:
    """One row: microseconds over each transport."""
    call, rank = KINDS[kind], dist.get_rank()
    x = torch.randn(max(ranks, size // 4), generator=torch.Generator().manual_seed(rank))
    times: dict[str, list[float]] = {label: [] for label in GROUPS}
    digests = {}
    for turn in range(TURNS):
        for label, group in GROUPS.items():
            began = time.perf_counter()
            result = call(x, ranks, group)
            first = time.perf_counter() - began
            calls = torch.tensor(int(min(200, max(1, seconds / TURNS / first))))
            dist.broadcast(calls, 0)
            for _ in range(int(calls)):
                began = time.perf_counter()
                result = call(x, ranks, group)
                times[label].append(time.perf_counter() - began)
            if turn == 0 and label != OWN:
                digests[label] = hashlib.sha256(result.numpy().tobytes()).hexdigest()
    median = {label: statistics.median(found) * 1e6 for label, found in times.items()}
    return (
        {"kind": kind, "bytes": x.nbytes}
        | median
        | {
            "times faster": f"{median[ORDERED] / median[SHARED]:.1f}",
            "same bits": digests[ORDERED] == digests[SHARED],
        }
    )


if __name__ == "__main__":
    main()
