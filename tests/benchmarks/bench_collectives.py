"""What a collective takes, and a step: `python tests/benchmarks/bench_collectives.py [--ranks N] [--step] [--hogs N]`.

Forked ranks, on cores as in a run, call each collective over three transports in turns, so that all see the same
machine: gloo's own group, the rank-order group over gloo, and shared memory. Sizes are bytes of all ranks' parts:
what an all-gather returns, what a rank gives to the others. Times are microseconds, medians of rank 0 over the calls of
all turns, each call waited for on the spot, as in eager code. What the two rank-order transports compute is compared
bit for bit.

`--step` times whole eager steps of moe_seq instead, over the two rank-order transports in turns: seconds of rank 0.
`--hogs N` keeps N processes busy beside it, as on a machine that has other things to do.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tabulate import tabulate

from bitproof.builtin_cases import CASES
from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.processes.process import keep_to_one_core
from bitproof.harness.torch_distributed import register_group, unregister_group
from bitproof.reference.parallel import mesh as meshes
from bitproof.reference.parallel.collectives import all_gather, all_to_all, reduce_scatter
from bitproof.reference.parallel.mesh import FSDP, Mesh
from bitproof.reference.parallel.rank_order_group import RankOrderGroup
from bitproof.reference.step import make_eager
from tests.ranks import on_ranks

OWN, ORDERED, SHARED = "gloo's own", "rank order, gloo", "rank order, shared"
GROUPS = {OWN: "own", ORDERED: "ordered", SHARED: FSDP}
KINDS: dict[str, Callable[[Tensor, int, str], Tensor]] = {
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": lambda x, size, group: all_to_all(x, [len(x) // size] * size, [len(x) // size] * size, group),
}
TURNS = 4
MAX_CALLS = 100
"""Of one transport in a turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each transport, for a kind and size")
    parser.add_argument("--smallest", type=int, default=64)
    parser.add_argument("--largest", type=int, default=64 << 20)
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hogs", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with busy(options.hogs):
        if options.step:
            case = CASES["moe_seq"]
            case = replace(case, parallelism=replace(case.parallelism, world_size=options.ranks))
            rows = on_ranks(case.parallelism, lambda mesh: steps(case, mesh, options.steps), collectives="shared")[0]
        else:
            sizes = [64 << 2 * i for i in range(11) if options.smallest <= 64 << 2 * i <= options.largest]
            parallelism = Parallelism(world_size=options.ranks, ep=1)
            rows = on_ranks(parallelism, lambda mesh: calls(mesh, sizes, options.seconds), collectives="shared")[0]
    print(f"{options.ranks} ranks, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(tabulate(rows, headers="keys", floatfmt=".3f" if options.step else ".0f"))


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    children = []
    for _ in range(count):
        child = os.fork()
        while child == 0:
            pass
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def calls(mesh: Mesh, sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """A row for each kind and size."""
    world_size = mesh.parallelism.world_size
    keep_to_one_core(mesh.rank, world_size)
    own, ordered = dist.new_group(), RankOrderGroup(dist.new_group())
    register_group(GROUPS[OWN], own)
    register_group(GROUPS[ORDERED], ordered)
    return [measure(kind, size, world_size, seconds) for kind in KINDS for size in sizes]


def measure(kind: str, size: int, world_size: int, seconds: float) -> dict[str, Any]:
    """One row: microseconds over each transport."""
    call = KINDS[kind]
    count = max(world_size, size // 4) // (world_size if kind == "all-gather" else 1)
    x = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
    times: dict[str, list[float]] = {label: [] for label in GROUPS}
    digests = {}
    for turn in range(TURNS):
        for label, group in GROUPS.items():
            began = time.perf_counter()
            result = call(x, world_size, group)
            first = time.perf_counter() - began
            left = torch.tensor(min(MAX_CALLS, int(seconds / TURNS / first)))
            dist.broadcast(left, 0)
            times[label] += [first] if turn else []
            for _ in range(int(left)):
                began = time.perf_counter()
                result = call(x, world_size, group)
                times[label].append(time.perf_counter() - began)
            if turn == 0:
                digests[label] = hashlib.sha256(result.numpy().tobytes()).hexdigest()
    median = {label: statistics.median(found) * 1e6 for label, found in times.items()}
    faster = {"times faster": f"{median[ORDERED] / median[SHARED]:.1f}"}
    return (
        {"kind": kind, "bytes": max(4 * world_size, size)}
        | median
        | faster
        | {"same bits": digests[ORDERED] == digests[SHARED]}
    )


def steps(case: Case, mesh: Mesh, count: int) -> list[dict[str, Any]]:
    """A row for each of the rank-order transports: a step of the eager chunked system, recorded."""
    set_determinism(case.seed)
    keep_to_one_core(mesh.rank, case.parallelism.world_size)
    trainer = make_eager(case, mesh, mesh.device, True, lambda gradients: gradients)
    groups: dict[str, dict[str, Any]] = {SHARED: dict(meshes.joined_groups), ORDERED: {}}
    for name in groups[SHARED]:
        over_gloo = [dist.new_group(ranks) for ranks in mesh.partition(name)]
        mine = [mesh.rank in ranks for ranks in mesh.partition(name)].index(True)
        groups[ORDERED][name] = RankOrderGroup(over_gloo[mine])
    recorder = Recorder(mesh.rank)
    recorder.step = -1
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in groups}
    for turn in range(count + 1):
        for label, joined in groups.items():
            for name, group in joined.items():
                unregister_group(name)
                register_group(name, group)
            dist.barrier()
            began, computed = time.perf_counter(), time.process_time()
            recorder.step += 1
            trainer.step(recorder.step, recorder.observe)
            if turn:
                times[label].append((time.perf_counter() - began, time.process_time() - computed))
    rows = []
    for label, found in times.items():
        seconds, cpu = ([pair[i] for pair in found] for i in (0, 1))
        summary = {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
        rows.append({"transport": label} | summary | {"of the CPU": statistics.median(cpu)})
    return rows


if __name__ == "__main__":
    main()
