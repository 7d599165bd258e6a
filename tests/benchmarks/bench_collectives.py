"""What a collective takes, and a step: `python tests/benchmarks/bench_collectives.py [--ranks N] [--step] [--hogs N]`.

Forked ranks, on cores as in a run, call each collective over three transports in turns, so that all see the same
machine: gloo's own group, the rank-order group over gloo, and shared memory. Sizes are bytes of all ranks' parts:
what an all-gather returns, what a rank gives to the others. Times are microseconds, medians of rank 0 over the calls of
all turns, each call waited for on the spot, as in eager code. What the two rank-order transports compute is compared
bit for bit.

`--step` times whole steps of the three cases instead, of both systems, over four transports in turns. Two exchange and
record all: those in rank order. With "meetings alone" ranks wait for each other in each collective, but exchange, add
and record nothing. With "none, unrecorded" no rank waits for another: what remains are the step's own calls, on as many
elements. The last line has what the CPUs need for 20 steps of all, twice: no run with controls can be shorter.
`--hogs N` keeps N processes busy beside it, as on a machine that has other things to do.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from bitproof.harness.case import Case, Kind, Parallelism
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.processes.process import keep_to_one_core
from bitproof.harness.systems.graph import prepare
from bitproof.harness.systems.graph_program import GraphProgram, make_graph_system
from bitproof.harness.torch_distributed import register_group, unregister_group
from bitproof.reference.parallel import mesh as meshes
from bitproof.reference.parallel.collectives import all_gather, all_to_all, reduce_scatter
from bitproof.reference.parallel.mesh import FSDP, Mesh
from bitproof.reference.parallel.rank_order_group import LoneGroup, RankOrderGroup
from bitproof.reference.parallel.shared_memory_group import SharedMemoryGroup
from bitproof.reference.step import make_eager
from tests.figures import figure
from tests.ranks import on_ranks

OWN, ORDERED, SHARED = "gloo's own", "rank order, gloo", "rank order, shared"
MET, SILENT = "meetings alone", "none, unrecorded"
STEP_CASES = ("transformer_batch", "moe_batch", "moe_seq")
GROUPS = {OWN: "own", ORDERED: "ordered", SHARED: FSDP}
KINDS: dict[str, Callable[[Tensor, int, str], Tensor]] = {
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": lambda x, size, group: all_to_all(x, [len(x) // size] * size, [len(x) // size] * size, group),
}
TURNS = 4
MAX_CALLS = 100
"""Of one transport in a turn."""


def main() -> int:
    """Measure and print; 1 if shared memory misses its goal."""
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
            rows = []
            for name in STEP_CASES:
                parallelism = replace(CASES[name].parallelism, world_size=options.ranks)
                rows += step_rows(replace(CASES[name], parallelism=parallelism), options.steps)
        else:
            sizes = [64 << 2 * i for i in range(11) if options.smallest <= 64 << 2 * i <= options.largest]
            parallelism = Parallelism(world_size=options.ranks, ep=1)
            rows = on_ranks(parallelism, lambda mesh: calls(mesh, sizes, options.seconds), collectives="shared")[0]
    print(f"{options.ranks} ranks, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(tabulate(rows, headers="keys", floatfmt=".3f" if options.step else ".0f"))
    if options.step:
        print(limits(rows))
        return 0
    return figure("bench.collectives", statistics.median(row[SHARED] / row[OWN] for row in rows))


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


class Silent(LoneGroup):
    """A group whose every rank behaves as if all held what it holds: nothing is exchanged, waited for or added.

    A rank's tensors have as many elements as with the others, so its step calls the same operators.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        dist.ProcessGroup.__init__(self, group.rank(), group.size())  # type: ignore[call-arg]

    def _all_gather(self, output: Tensor, x_N: Tensor) -> dist.Work:
        return super()._all_gather(output.view(self.size(), -1), x_N.reshape(1, -1).expand(self.size(), -1))

    def _reduce_scatter(self, output_N: Tensor, x: Tensor) -> dist.Work:
        return super()._reduce_scatter(output_N, x.view(self.size(), -1)[self.rank()])


class Met(Silent):
    """A silent group whose ranks wait for each other in every collective, as they do in shared memory."""

    def __init__(self, group: SharedMemoryGroup) -> None:
        super().__init__(group)
        self._ring = group.inline

    def _all_to_all(self, *given: Any) -> dist.Work:
        self._meet()
        return super()._all_to_all(*given)

    def _all_gather(self, *given: Any) -> dist.Work:
        self._meet()
        return super()._all_gather(*given)

    def _reduce_scatter(self, *given: Any) -> dist.Work:
        self._meet()
        return super()._reduce_scatter(*given)

    def _all_reduce(self, x: Tensor) -> dist.Work:
        self._meet()
        return super()._all_reduce(x)

    def _meet(self) -> None:
        self._ring.begin_post()
        self._ring.end_post()
        self._ring.begin_read()
        self._ring.end_read()


def step_rows(case: Case, count: int) -> list[dict[str, Any]]:
    """A row for each system and transport: seconds of the slowest rank's step, and the CPU seconds of all ranks'."""
    programs = {"eager_chunked": None, "graph": prepare(case, torch.device("cpu"))}
    rows = []
    for system, program in programs.items():
        ranks = on_ranks(case.parallelism, functools.partial(steps, case, program, count), collectives="shared")
        for label in ranks[0]:
            clock, cpu = zip(*(found[label] for found in ranks), strict=True)
            rows.append({"case": case.name, "system": system, "transport": label, "s": max(clock), "CPU s": sum(cpu)})
    return rows


def steps(case: Case, program: GraphProgram | None, count: int, mesh: Mesh) -> dict[str, tuple[float, float]]:
    """The median seconds of this rank's step by the clock, and of the CPU, for each transport in turns."""
    set_determinism(case.seed)
    keep_to_one_core(mesh.rank, case.parallelism.world_size)
    if program is None:
        trainer = make_eager(case, mesh, mesh.device, True, lambda gradients: gradients)
    else:
        trainer = make_graph_system(case, mesh, mesh.device, program, lambda gradients: gradients)
    groups: dict[str, dict[str, Any]] = {SHARED: dict(meshes.joined_groups), ORDERED: {}, MET: {}, SILENT: {}}
    for name, shared in groups[SHARED].items():
        over_gloo = [dist.new_group(ranks) for ranks in mesh.partition(name)]
        mine = [mesh.rank in ranks for ranks in mesh.partition(name)].index(True)
        groups[ORDERED][name] = RankOrderGroup(over_gloo[mine])
        groups[MET][name] = Met(shared) if isinstance(shared, SharedMemoryGroup) else Silent(shared)
        groups[SILENT][name] = Silent(shared)
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
            trainer.step(recorder.step, _unseen if label in (MET, SILENT) else recorder.observe)
            if turn:
                times[label].append((time.perf_counter() - began, time.process_time() - computed))
    medians = {}
    for label, found in times.items():
        clock, cpu = zip(*found, strict=True)
        medians[label] = (statistics.median(clock), statistics.median(cpu))
    return medians


def _unseen(kind: Kind, name: str, tensor: Tensor) -> None:
    """Record nothing."""


def limits(rows: list[dict[str, Any]], num_steps: int = 20) -> str:
    """What the CPUs need for the steps of these cases, each system run twice."""
    cores = len(os.sched_getaffinity(0))
    lines = []
    for label in (SHARED, MET, SILENT):
        cpu = sum(row["CPU s"] for row in rows if row["transport"] == label) * num_steps * 2
        lines.append(f"{label}: {cpu:.1f} CPU s, {cpu / cores:.1f} s on {cores} cores")
    return f"\n{num_steps} steps of both systems, twice: {'; '.join(lines)}"


if __name__ == "__main__":
    sys.exit(main())
