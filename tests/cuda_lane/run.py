"""The CUDA lane: run graph cases as CUDA would trace them, on a machine without a GPU.

    python tests/cuda_lane/run.py [--devices 0,7] [what `bitproof run` takes]

The step is traced on fake CUDA tensors, goes through every pass in CUDA's own operators (flash and efficient attention,
pinned copies), is verified, mapped to the CPU and run there on gloo ranks, against eager on the CPU. What stays untried
is what needs a GPU: kernels, streams, NCCL. Ends as `bitproof run` does.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from harness.cli import main as bitproof
from harness.execute import host_process
from tests.cuda_lane import stand_in
from tests.cuda_lane.host import DEVICES


def main(arguments: list[str]) -> int:
    """Run the lane; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default="0,7", help="device indices to trace for, all to one code")
    options, rest = parser.parse_known_args(arguments)
    if problem := stand_in.why_not():
        print(problem, file=sys.stderr)
        return 3
    stand_in.build()
    os.environ[DEVICES] = options.devices
    host_process._START = str(Path(__file__).with_name("host.py"))
    return bitproof(["run", "--device", "cpu", *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
