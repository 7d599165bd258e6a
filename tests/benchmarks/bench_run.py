"""How long `bitproof run` of the three cases takes, how much memory, and where the time goes.

    python tests/benchmarks/bench_run.py [--control] [--runs N] [--jobs N]
    python tests/benchmarks/bench_run.py --inner-loop [--runs N] [--beside PYTHON] [--extra-pass FILE:FUNCTION]

With --inner-loop the command is the one that somebody who writes a pass gives all day, moe_seq on 2 ranks for 2 steps,
timed from its start to its exit, with its graph traced anew and with the graph that an earlier run kept; PYTHON is that
of another checkout, whose command is run in turn with ours (a release that keeps no graphs traces both times). With
--extra-pass the command has a pass of one's own, and no graph is ever kept.
Budgets, on 2 cores: 8 s for the inner loop, 5 s with a kept graph, 0.5 s of it after the verdict. For the three cases
45 s from process start to report, 10 GiB in all processes together, and a comparison (recording included) that costs
5% or less of the two systems' step time.

The figure is the seconds of the three cases beyond their steps' own calls. These are torch's operators and our
collectives (bench_collectives). Among them are products in bfloat16: on a CPU without instructions for it, the steps
took 92 of 110 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures import figure

CASES = "transformer_batch or moe_batch or moe_seq"
INNER_LOOP = ("run", "-k", "moe_seq", "--world-size", "2", "--steps", "2")
SAMPLE_SECONDS = 0.5


def main() -> int:
    """Measure and print; 1 if the three cases without controls miss their goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", action="store_true", help="run every system twice")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", default="1", metavar="N|auto", help="run so many cases side by side")
    parser.add_argument("--inner-loop", action="store_true", help="time one small case, from command to exit")
    parser.add_argument("--extra-pass", metavar="FILE:FUNCTION", help="put a pass into the inner loop's candidate")
    parser.add_argument("--beside", action="append", default=[], metavar="PYTHON", help="run another checkout's, too")
    options = parser.parse_args()
    if options.inner_loop:
        more = ("--extra-pass", options.extra_pass) if options.extra_pass else ()
        time_inner_loop([sys.executable, *options.beside], options.runs, more)
        return 0
    runs = [measure(options.control, options.jobs) for _ in range(options.runs)]
    for run in runs:
        print(f"{run['wall']:.1f} s from start to report, {run['memory'] / 2**30:.2f} GiB at most in all processes")
    wall, memory = (statistics.median(run[name] for run in runs) for name in ("wall", "memory"))
    print(f"\nmedian of {len(runs)}: {wall:.1f} s, {memory / 2**30:.2f} GiB (budget 10 GiB)\n")
    middle = min(runs, key=lambda run: abs(run["wall"] - wall))
    rows = [breakdown(case) for case in middle["report"]["cases"]]
    print("where the time of the middle run goes, in seconds:")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    alone = sum(row["steps alone"] for row in rows)
    beyond = statistics.median(beyond_steps(run) for run in runs)
    print(f"steps alone, by their median: {alone:.1f} s; beyond them: {beyond:.1f} s, median of {len(runs)}")
    accounted = sum(row["in all"] for row in rows)
    if options.jobs == "1":
        print(
            f"\nstart of the command and the host (import of torch), ends of ranks: {middle['wall'] - accounted:.1f} s"
        )
    return 0 if options.control or options.jobs != "1" else figure("bench.run", beyond)


def time_inner_loop(pythons: list[str], num_runs: int, more: tuple[str, ...]) -> None:
    """Print the medians of the inner loop's phases for each Python, their runs taken in turn."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = [(python, graph) for python in pythons for graph in (("anew",) if more else ("anew", "kept"))]
        for python, graph in kinds:
            if graph == "kept":
                inner_loop(python, more, kept_in(folder, python))
        runs = []
        for turn in range(num_runs):
            for python, graph in kinds:
                cache = kept_in(folder, python) if graph == "kept" else Path(folder) / f"{turn}-{len(runs)}"
                runs.append((python, graph, inner_loop(python, more, cache)))
    rows = []
    for python, graph in kinds:
        own = [phases for *kind, phases in runs if kind == [python, graph]]
        medians = {name: statistics.median(phases[name] for phases in own) for name in own[0]}
        spread = f"{min(phases['all'] for phases in own):.2f} to {max(phases['all'] for phases in own):.2f}"
        rows.append({"python": python, "graph": graph, **medians, "all, from to": spread})
    print(f"bitproof {' '.join([*INNER_LOOP, *more])}, medians of {num_runs} in seconds:")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))


def kept_in(folder: str, python: str) -> Path:
    """Where a Python's runs find the graphs of its earlier ones."""
    return Path(folder) / python.replace("/", "_")


def inner_loop(python: str, more: tuple[str, ...], cache: Path) -> dict[str, float]:
    """One run of the inner loop: seconds until ranks start, until the verdict, after it, and of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "bitproof", *INNER_LOOP, *more, "--report-dir", folder]
        began, at = time.monotonic(), {"start ranks": 0.0, " in ": 0.0}
        # In the folder, lest Python take our packages for those of another checkout.
        environment = os.environ | {"BITPROOF_CACHE": str(cache)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                for mark in at:
                    is_verdict = mark == "start ranks" or ("moe_seq: " in line and "cases)" in line)
                    at[mark] = at[mark] or (time.monotonic() - began if mark in line and is_verdict else 0.0)
        ended = time.monotonic() - began
    assert process.returncode == (1 if more else 0) and all(at.values()), (
        "a benchmark of a failing run measures nothing"
    )
    starting, verdict = at.values()
    return {
        "until ranks": starting,
        "until verdict": verdict - starting,
        "after verdict": ended - verdict,
        "all": ended,
    }


def measure(control: bool, jobs: str) -> dict[str, Any]:
    """Run the three cases once: seconds, largest memory of all processes together in bytes, and the report."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-m", "bitproof", "run", "-k", CASES, "--report-dir", folder, "-j", jobs]
        arguments += [] if control else ["--no-control"]
        start = time.monotonic()
        process = psutil.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
        memory = 0
        while process.poll() is None:
            memory = max(memory, memory_of(process))
            time.sleep(SAMPLE_SECONDS)
        wall = time.monotonic() - start
        report = json.loads((Path(folder) / "latest" / "report.json").read_text())
    assert report["exit_status"] == 0, "a benchmark of a failing run measures nothing"
    return {"wall": wall, "memory": memory, "report": report}


def memory_of(process: psutil.Process) -> int:
    """Bytes of a process and all below it; pages that forked ranks share count once (PSS)."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended while we looked
            continue
    return total


def steps_alone(case: dict[str, Any]) -> float:
    """Seconds of all steps of both systems, and of their controls, without what recording them costs.

    It is what the steps' own calls and collectives take: what else a run does can be made cheaper, this cannot.
    """
    runs = 2 if case["seconds"].get("control") else 1
    return sum(side["step_seconds"] * case["steps"] * runs for side in case["throughput"].values())


def beyond_steps(run: dict[str, Any]) -> float:
    """Seconds of a run from start to report, less those of its steps' own calls."""
    seconds: float = run["wall"] - sum(steps_alone(case) for case in run["report"]["cases"])
    return seconds


def breakdown(case: dict[str, Any]) -> dict[str, Any]:
    """One case's row: phases in seconds, and the comparison's share of both systems' steps."""
    seconds = case["seconds"]
    steps = seconds["reference"] + seconds["candidate"]
    record = sum(seconds["record"].values())
    phases = {
        "trace": seconds["trace"],
        "passes": sum(seconds["passes"].values()),
        "start ranks": sum(seconds["start_ranks"].values()),
        "reference": seconds["reference"],
        "candidate": seconds["candidate"],
        "compare": seconds["compare"],
        "controls": sum(seconds.get("control", {}).values()),
    }
    share = (record + seconds["compare"]) / (steps - record)
    return {
        "case": case["name"],
        **phases,
        "in all": seconds["total"],
        "of which recording": record,
        "steps alone": steps_alone(case),
        "comparison / steps": f"{share:.1%}",
    }


if __name__ == "__main__":
    sys.exit(main())
