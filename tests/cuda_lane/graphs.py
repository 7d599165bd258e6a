"""Hold the graph of each case of the CUDA lane to what a GPU needs of it, and run nothing: `graphs.py [--slice i/n]`.

A step is traced for one device and goes through every pass of each case. Its finished graph must have

1. no hazard: two calls that use the same memory on two streams, or beside a collective or copy, without an order,
2. few places where the host waits for the device: two, and two more for each layer of experts,
3. a check of 1 that takes less than 5 % of the time of the passes, over several cases.

A line a case; ends with 1 if a graph does not hold to these, 3 without a C++ compiler.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness.case import Case
from tests.cuda_lane import stand_in
from tests.cuda_lane.selection import slice_of, step_of, timed_cases

MOST_SHARE = 0.05


def most_host_waits(parameter_names: list[str]) -> int:
    """The most often that the host may wait for the device in a step: by its layers of experts."""
    return 2 + 2 * len({name.partition(".experts.")[0] for name in parameter_names if ".experts." in name})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", metavar="i/n", default="1/1", help="one of n parts, whose steps are alike")
    parser.add_argument("--names", default="", help="these cases alone, with commas between")
    options = parser.parse_args()
    if problem := stand_in.why_not():
        print(problem, file=sys.stderr)
        return 3
    names = {*filter(None, options.names.split(","))}
    cases = [case for case in slice_of(timed_cases(), options.slice, 1) if not names or case.name in names]
    stand_in.load()
    return hold(cases)


def hold(cases: list[Case], change: Callable[[Any], None] = lambda module: None) -> int:
    """Trace and rewrite the cases, and tell of each; returns the exit status. `change` is for tests: it spoils graphs.

    The stand-in for CUDA must be loaded.
    """
    import torch

    from bitproof.harness.graph.graph_options import GraphOptions
    from bitproof.harness.machine.determinism import set_determinism
    from bitproof.harness.systems import graph
    from tests.cuda_lane import operators, tracer
    from tests.cuda_lane.to_cpu import host_waits
    from tests.harness.graph.graphs import copied

    torch.set_num_threads(1)
    set_determinism(0)
    operators.install()
    steps: dict[Any, Any] = {}
    wrong, took, passes = 0, 0.0, 0.0
    for case in cases:
        if step_of(case) not in steps:
            steps = {step_of(case): tracer.trace_all(case)[0]}
        step = steps[step_of(case)]
        with operators.current_device(0) as cuda:
            copy = replace(step, joint=copied(step.joint))
            program = graph.finish(copy, case, cuda, GraphOptions(), lambda place: None)
        change(program.module)
        began = time.process_time()
        problems = program.hazards(case)
        took += time.process_time() - began
        passes += sum(report.seconds for report in program.passes)
        waits, most = host_waits(program.module).total(), most_host_waits(program.parameter_names)
        problems += (
            [] if waits <= most else [f"the host waits {waits} times for the device, at most {most} are allowed"]
        )
        wrong += bool(problems)
        nodes = len(program.module.graph.nodes)
        told = "; ".join(problems) or f"{nodes} nodes, the host waits {waits} times of {most}"
        print(f"{'FAIL' if problems else 'pass'}  {case.name:<28} {told}", flush=True)
    share = took / passes if passes else 1.0
    print(f"{len(cases)} graphs, {wrong} wrong; looking for hazards took {share:.2%} of the time of the passes")
    return 1 if wrong or (len(cases) > 1 and share > MOST_SHARE) else 0


if __name__ == "__main__":
    sys.exit(main())
