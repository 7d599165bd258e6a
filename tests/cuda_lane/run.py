"""The CUDA lane: run graph cases as CUDA would trace them, on a machine without a GPU.

    python tests/cuda_lane/run.py [--devices 0,7] [--every-case] [what `bitproof run` takes]

The step is traced on fake CUDA tensors, goes through every pass in CUDA's own operators (flash and efficient attention,
pinned copies), is verified, mapped to the CPU and run there, against eager on the CPU. What stays untried is what needs
a GPU: kernels, streams, NCCL. Ends as `bitproof run` does.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cases import CASES
from harness.cli import main as bitproof
from harness.execute import host_process
from tests.cuda_lane import stand_in
from tests.cuda_lane.host import DEVICES


def main(arguments: list[str]) -> int:
    """Run the lane; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="0,7", help="device indices to trace for, all to one code")
    parser.add_argument("--every-case", action="store_true", help="every case whose graph runs as it is")
    options, rest = parser.parse_known_args(arguments)
    if problem := stand_in.why_not():
        print(problem, file=sys.stderr)
        return 3
    stand_in.build()
    os.environ[DEVICES] = options.devices
    host_process._START = str(Path(__file__).with_name("host.py"))
    chosen = ["-k", every_graph_case()] if options.every_case else []
    return bitproof(["run", "--device", "cpu", *chosen, *rest])


def every_graph_case() -> str:
    """An expression for the cases that run a graph as it is and must be EQUAL; names select what has them within."""
    wanted = {case.name for case in CASES.values() if case.candidate == "graph" and case.expected == "EQUAL"}
    wanted = {name for name in wanted if CASES[name].pipeline.backend == "fx"}
    named, others = ([name for name in CASES if (name in wanted) is is_wanted] for is_wanted in (True, False))
    return f"({' or '.join(named)}) and not ({' or '.join(others)})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
