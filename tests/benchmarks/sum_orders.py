"""Which cases see the order of sums over ranks: `python tests/benchmarks/sum_orders.py [-k EXPR] [--steps N]`.

A case's ranks take some steps, with its groups replaced by some that take every sum in ascending rank order, as always,
and besides in each order that the fault `sum-order` knows, and count the elements that would have had other bits. What
ranks sum is gradients, and sums of layers under tensor parallelism: each is recorded, or goes into what is. A case that
buckets takes its steps as a graph, where messages have other sizes, all others as eager code; nothing is compiled. Sums
of two ranks have one order, as addition commutes.

Ends with 1 when a case of `cases.bucketing.SEE_ORDER` sees less than all of them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tabulate import tabulate
from torch import Tensor

from bitproof.builtin_cases import CASES, bucketing
from bitproof.harness.case import TRACED, Case
from bitproof.harness.case.select import select
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.systems.graph import prepare
from bitproof.harness.systems.graph_key import placed_case
from bitproof.harness.systems.graph_program import make_graph_system
from bitproof.harness.torch_distributed import unregister_group
from bitproof.reference.parallel import mesh as meshes
from bitproof.reference.parallel.device_order_group import DeviceOrderGroup
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.parallel.other_order_group import ORDERS, sum_in_order
from bitproof.reference.parallel.rank_order_group import sum_in_rank_order
from bitproof.reference.step import make_eager
from tests.figures import figure
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default=None, metavar="EXPR", help="cases to take, in pytest's -k syntax")
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_determinism(0)
    rows, blind = [], []
    taken = [*filter(takes_steps_here, select(CASES.values(), options.k))]
    for case in taken:
        counts = measure(case, options.steps)
        rows.append({"case": case.name} | {order: describe(counts, order) for order in ORDERS})
        print(tabulate(rows[-1:], tablefmt="plain"), flush=True)
        if case in bucketing.SEE_ORDER and not all(counts[order] for order in ORDERS):
            blind.append(case.name)
    print()
    print(tabulate(rows, headers="keys", tablefmt="github"))
    if blind:
        print(f"blind for some order, though it is there to see them: {', '.join(blind)}")
    looked = sum(case in bucketing.SEE_ORDER for case in taken)
    return figure("sum-orders", 1 - len(blind) / looked if looked else math.nan)


def takes_steps_here(case: Case) -> bool:
    """Whether a case has steps of its own, and not those of the graph that another case's steps are compared with."""
    return case.reference in ("eager", "eager_chunked") and case.candidate in TRACED


def describe(counts: Counter[str], order: str) -> str:
    if not counts["sums"]:
        return "no sum of 3 ranks"
    return f"yes, {counts[order]:,} of {counts['elements']:,}" if counts[order] else f"no, 0 of {counts['elements']:,}"


def measure(case: Case, steps: int) -> Counter[str]:
    """By order the elements whose sum has other bits, over all ranks; "elements" and "sums" are of all."""
    case = placed_case(replace(case, pipeline=replace(case.pipeline, backend="fx", regions=())))
    program = prepare(case, CPU, system=case.candidate) if case.pipeline.bucket else None

    def body(mesh: Mesh) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for name, group in dict(meshes.joined_groups).items():
            if not isinstance(group, Counting):
                unregister_group(name)
                meshes.keep_group(name, meshes.partitions[name], Counting(group, counts))
        meshes.disturbances.append(lambda group: Counting(group, counts))
        if program is not None:
            trainer = make_graph_system(case, mesh, CPU, program, lambda gradients: gradients)
        else:
            trainer = make_eager(case, mesh, CPU, case.reference == "eager_chunked", lambda gradients: gradients)
        for step in range(steps):
            trainer.step(step, lambda kind, name, tensor: None)
        return dict(counts)

    return sum((Counter(answer) for answer in on_ranks(case.parallelism, body)), Counter())


class Counting(DeviceOrderGroup):
    """Adds in ascending rank order, and counts what other orders would have changed."""

    def __init__(self, transport: Any, counts: Counter[str]) -> None:
        super().__init__(transport)
        self._counts = counts

    def _sum(self, parts_WN: Tensor) -> Tensor:
        total_N = sum_in_rank_order(parts_WN)
        if len(parts_WN) > 2 and parts_WN.is_floating_point():
            self._counts["sums"] += 1
            self._counts["elements"] += total_N.numel()
            for order in ORDERS:
                self._counts[order] += int((sum_in_order(parts_WN, order) != total_N).sum())
        return total_N


if __name__ == "__main__":
    sys.exit(main())
