"""How long `bitproof run` of the three cases takes, how much memory, and where the time goes.

    python tests/benchmarks/bench_run.py [--control] [--runs N]

Budgets, on 2 cores: 120 s from process start to report, 10 GiB in all processes together, and a
comparison (recording included) that costs 10% or less of the two systems' step time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from tabulate import tabulate

CASES = "transformer_batch or moe_batch or moe_seq"
SAMPLE_SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", action="store_true", help="run every system twice")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    runs = [measure(options.control) for _ in range(options.runs)]
    for run in runs:
        print(f"{run['wall']:.1f} s from start to report, {run['memory'] / 2**30:.2f} GiB at most in all processes")
    wall, memory = (statistics.median(run[name] for run in runs) for name in ("wall", "memory"))
    print(f"\nmedian of {len(runs)}: {wall:.1f} s (budget 120 s), {memory / 2**30:.2f} GiB (budget 10 GiB)\n")
    middle = min(runs, key=lambda run: abs(run["wall"] - wall))
    rows = [breakdown(case) for case in middle["report"]["cases"]]
    print("where the time of the middle run goes, in seconds:")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    accounted = sum(row["in all"] for row in rows)
    print(f"\nstart of the command and the host (import of torch), ends of ranks: {middle['wall'] - accounted:.1f} s")


def measure(control: bool) -> dict[str, Any]:
    """Run the three cases once: seconds, largest memory of all processes together in bytes, and the report."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-m", "harness", "run", "-k", CASES, "--report-dir", folder]
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
    }
    share = (record + seconds["compare"]) / (steps - record)
    return {
        "case": case["name"],
        **phases,
        "in all": seconds["total"],
        "of which recording": record,
        "comparison / steps": f"{share:.1%}",
    }


if __name__ == "__main__":
    main()
