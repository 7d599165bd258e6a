"""Do systems repeat themselves? Runs each system of some cases again and again, and compares with its first run.

    python tests/benchmarks/bench_control.py [--runs 50] [--steps 20] [--world-size 8] [-k EXPR] [--stress]

A control run is one more run of a system, compared with its first recording in every bit. The table tells how many
of them were EQUAL, and what one takes. Ends with 1 when one was not.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bitproof.builtin_cases import all_cases
from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.case import Case
from bitproof.harness.case.select import select
from bitproof.harness.compare.verdict import Comparison, compare
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.execute.session import Session, open_session
from bitproof.harness.options import ROLES, Role, RunOptions, Stress
from bitproof.harness.records import Verdict
from bitproof.harness.report.text import locate

CASES = "transformer_batch or moe_batch or moe_seq"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="control runs of each system of each case")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("-k", dest="expression", default=CASES)
    parser.add_argument("--stress", action="store_true", help="put every control run under stress")
    chosen = parser.parse_args()
    options = RunOptions(stress=Stress() if chosen.stress else None)
    cases = [change(case, chosen) for case in select(all_cases(), chosen.expression)]
    rows: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="bench_control-"))
    try:
        with open_session(folder, options) as session:
            for case in cases:
                rows += [repeat(session, case, role, chosen.runs, options) for role in ROLES]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{tabulate(rows, headers='keys', floatfmt='.1f')}")
    equal, runs = (sum(row[name] for row in rows) for name in ("EQUAL", "runs"))
    print(f"\n{equal} of {runs} control runs are EQUAL")
    sys.exit(equal != runs)


def change(case: Case, chosen: argparse.Namespace) -> Case:
    """A case of the size that the command line asks for."""
    return replace(case, steps=chosen.steps, parallelism=replace(case.parallelism, world_size=chosen.world_size))


def repeat(session: Session, case: Case, role: Role, runs: int, options: RunOptions) -> dict[str, Any]:
    """Run one system again and again: its row of the table."""
    equal, seconds = 0, []
    for turn, (comparison, took) in enumerate(control_runs(session, case, role, runs, options), 1):
        equal += comparison.verdict == Verdict.EQUAL
        seconds.append(took)
        told = f"{case.name} {getattr(case, role)}: control run {turn} of {runs} {comparison.verdict} in {took:.1f} s"
        print(" ".join(filter(None, (told, comparison.reason, locate(comparison.first_divergence)))), flush=True)
    median = statistics.median(seconds)
    return {"case": case.name, "system": getattr(case, role), "runs": runs, "EQUAL": equal, "median s": median}


def control_runs(
    session: Session, case: Case, role: Role, runs: int, options: RunOptions
) -> Iterator[tuple[Comparison, float]]:
    """What each control run of a system came to, and how long it took with its comparison, in seconds."""
    first = record(session, case, role, "first", options)
    for _ in range(runs):
        began = time.monotonic()
        out = record(session, case, role, "stress" if options.stress else "control", options)
        comparison = compare(read_recording(first), read_recording(out), case)
        shutil.rmtree(out)
        yield comparison, time.monotonic() - began


def record(session: Session, case: Case, role: Role, arm: str, options: RunOptions) -> Path:
    """One run of a system, with the whole time of a case of its own."""
    out = session.run_dir / f"{case.name}-{role}-{arm}"
    CaseRun(case, session.place(case), session, options, lambda event: None).record(role, arm, out=out)
    return out


if __name__ == "__main__":
    main()
