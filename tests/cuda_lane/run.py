"""The CUDA lane: run graph cases as CUDA would trace them, on a machine without a GPU.

    python tests/cuda_lane/run.py [--devices 0,7] [--every-case [--jobs n | --slice i/n]] [what `bitproof run` takes]
    python tests/cuda_lane/run.py --add-up REPORT_DIR...

The step is traced on fake CUDA tensors, goes through every pass in CUDA's own operators (flash and efficient attention,
pinned copies), is verified, mapped to the CPU and run there, against eager on the CPU. What stays untried is what needs
a GPU: kernels, streams, NCCL. Ends as `bitproof run` does. What the programs were, and what came of them, is added up
at the end, and by `--add-up` for slices that ran by themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness.cli import arguments as cli_arguments
from bitproof.harness.cli import main as bitproof
from bitproof.harness.processes import started
from tests.cuda_lane import stand_in
from tests.cuda_lane.host import REFERENCES
from tests.cuda_lane.selection import TAKEN, slice_of, timed_cases

DEVICES, FACTS = "BITPROOF_LANE_DEVICES", "BITPROOF_LANE_FACTS"
ALL_DEVICES = ",".join(map(str, range(stand_in.NUM_DEVICES)))
LANE_FILE = "cuda-lane.json"


def main(arguments: list[str]) -> int:
    """Run the lane; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default=ALL_DEVICES, help="device indices to trace for, all to one code")
    parser.add_argument(
        "--every-case", action="store_true", help="all cases that run a graph as it is, but debug models"
    )
    parser.add_argument("--slice", metavar="i/n", help="of every case one of n parts, whose steps are alike")
    parser.add_argument(
        "--jobs", type=int, default=1, help="so many slices of every case at a time, in REPORT_DIR/1 ..."
    )
    parser.add_argument("--add-up", nargs="+", type=Path, metavar="REPORT_DIR", help="tell what slices came to")
    parser.add_argument("--report-dir", type=Path, default=Path("reports"))
    options, rest = parser.parse_known_args(arguments)
    if options.add_up:
        print(add_up(options.add_up))
        return 0
    if problem := stand_in.why_not():
        print(problem, file=sys.stderr)
        return 3
    stand_in.build()
    os.environ[DEVICES] = options.devices
    started.START = str(Path(__file__).with_name("host.py"))
    if options.jobs > 1:
        return run_slices(options.jobs, arguments, options.report_dir)
    if options.every_case:
        chosen = slice_of(timed_cases(), options.slice or "1/1", len(options.devices.split(",")))
        # Unlike an assignment, a patch fails if the module has no such name any more.
        patch.object(cli_arguments, "selected_cases", lambda expression: chosen).start()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as facts:
        os.environ[FACTS] = facts
        status = bitproof(["run", "--device", "cpu", "--report-dir", str(options.report_dir), *rest])
        latest = options.report_dir / "latest"
        if latest.exists():
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            times = {"seconds": time.monotonic() - began, "cpu seconds": used.ru_utime + used.ru_stime}
            programs = [json.loads(file.read_text()) for file in sorted(Path(facts).glob("*.json"))]
            reported = Path(facts, REFERENCES)
            references = Counter(reported.read_text().split() if reported.exists() else [])
            (latest / LANE_FILE).write_text(json.dumps({"programs": programs, "references": references, **times}))
            print(add_up([options.report_dir]))
    return status


def run_slices(jobs: int, arguments: list[str], report_dir: Path) -> int:
    """Run slices of every case side by side: tracing keeps one core busy. Returns the worst exit status."""
    began, dirs = time.monotonic(), [report_dir / str(index + 1) for index in range(jobs)]
    report_dir.mkdir(parents=True, exist_ok=True)
    running = []
    for index, folder in enumerate(dirs):
        own = ["--jobs", "1", "--slice", f"{index + 1}/{jobs}", "--report-dir", str(folder)]
        with (report_dir / f"{index + 1}.log").open("w") as log:
            running.append(subprocess.Popen([sys.executable, __file__, *arguments, *own], stdout=log, stderr=log))
    statuses = [process.wait() for process in running]
    if missing := [folder for folder in dirs if not (folder / "latest" / LANE_FILE).exists()]:
        print(f"no report in {', '.join(map(str, missing))}: see {report_dir}/*.log", file=sys.stderr)
        return 3
    print(add_up(dirs))
    print(f"{jobs} slices side by side: {time.monotonic() - began:.0f} s")
    return max(statuses)


def add_up(report_dirs: list[Path]) -> str:
    """What the latest runs in these folders came to, as a line each and one of all."""
    lines, programs, results, seconds, cpu = [], [], [], 0.0, 0.0
    references: Counter[str] = Counter()
    for folder in report_dirs:
        lane = json.loads((folder / "latest" / LANE_FILE).read_text())
        programs += lane["programs"]
        references.update(lane["references"])
        results += json.loads((folder / "latest" / "report.json").read_text())["cases"]
        seconds, cpu = seconds + lane["seconds"], cpu + lane["cpu seconds"]
    verdicts = {result["name"]: result for result in results}
    for program in programs:
        result = verdicts[program["case"]]
        differ, of = sum(result["mismatched"].values()), sum(result["compared"].values())
        lines.append(
            f"{program['case']:<32} {program['nodes']:>6} nodes  {program['code hash'][:12]}  "
            f"{result['verdict']}, {differ} of {of} records differ, controls {_controls(result)}, {_captured(program)}"
        )
    mapped = sorted({name for program in programs for name in program["mapped"]})
    equal = [result for result in results if result["verdict"] == "EQUAL"]
    agree = [result for result in results if set(result["control"].values()) == {"EQUAL"}]
    hashes = hashlib.sha256("".join(sorted(program["code hash"] for program in programs)).encode()).hexdigest()
    traced, rewritten = (sorted({program[name] for program in programs}) for name in ("traced for", "rewritten for"))
    lines.append(
        f"{len(results)} cases, {len(programs)} programs of {sum(program['nodes'] for program in programs):,} nodes, "
        f"each one code for {traced} devices ({rewritten} through every pass), {hashes[:12]} of all; "
        f"{sum(not program['not captured'] for program in programs)} could be captured as CUDA graphs; "
        f"{len(equal)} EQUAL, controls agree in {len(agree)}, "
        f"{sum(sum(result['compared'].values()) for result in results):,} records compared; "
        f"{references[TAKEN]} runs of references, which served {references.total()}; "
        f"{seconds:.0f} s, {cpu:.0f} CPU seconds\nmapped to the CPU: {', '.join(mapped)}"
    )
    return "\n".join(lines)


def _captured(program: dict[str, Any]) -> str:
    """Whether a program could be captured as a CUDA graph; why not, where it could not."""
    found = [f"{why} ({count} times)" for why, count in program["not captured"].items()]
    return f"not captured: {'; '.join(found)}" if found else "can be captured"


def _controls(result: dict[str, dict[str, str | None]]) -> str:
    return "/".join(str(verdict) for verdict in result["control"].values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
