"""Trace each step of the CUDA lane for all eight device indices, and run nothing: `indices.py [--jobs n]`.

The lane runs every case, and takes two indices of eight. This takes all eight and runs no case: of each step that is
another than those before it, the traces for all indices must be one, code and types. Passes see an index only in what
was traced. Ends with 1 where they are not one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cuda_lane import stand_in
from tests.cuda_lane.selection import every_graph_case, step_of
from tests.figures import figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="so many processes, each with its share of the steps")
    parser.add_argument("--part", metavar="i/n", default="1/1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if problem := stand_in.why_not():
        print(problem, file=sys.stderr)
        return 3
    if options.jobs > 1:
        stand_in.build()
        parts = [f"{index + 1}/{options.jobs}" for index in range(options.jobs)]
        running = [subprocess.Popen([sys.executable, __file__, "--part", part]) for part in parts]
        if status := max(process.wait() for process in running):
            return status
        return figure("cuda-indices", len({step_of(case) for case in every_graph_case()}))
    index, count = map(int, options.part.split("/"))
    return trace_steps(index - 1, count)


def trace_steps(index: int, count: int) -> int:
    """Trace every `count`-th step from `index` on, and tell of each. Returns the exit status."""
    os.environ["BITPROOF_LANE_DEVICES"] = ",".join(map(str, range(stand_in.NUM_DEVICES)))
    stand_in.load()
    import torch

    from bitproof.harness.errors import PassError
    from bitproof.harness.machine.determinism import set_determinism
    from tests.cuda_lane import operators, tracer

    torch.set_num_threads(1)
    set_determinism(0)
    operators.install()
    by_step: dict[object, list[str]] = {}
    first = {}
    for case in every_graph_case():
        by_step.setdefault(step_of(case), []).append(case.name)
        first.setdefault(step_of(case), case)
    status = 0
    for step in list(by_step)[index::count]:
        began, cases = time.process_time(), by_step[step]
        try:
            nodes = len(tracer.trace_all(first[step])[0].joint.module.graph.nodes)
        except PassError as error:
            status, found = 1, f"FAILED: {error}"
        else:
            found = f"one trace of {nodes:,} nodes for {stand_in.NUM_DEVICES} indices"
        print(f"{found}, {time.process_time() - began:.0f} CPU seconds: {', '.join(cases)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
