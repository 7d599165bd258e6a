"""What the comparison costs, and what the control adds to it.

    python tests/benchmarks/bench_comparison.py [-k EXPR] [--runs N] [--steps N] [--world-size N]

Budgets: recording every kind at every step on every rank, and comparing all of it, costs 10 % or less of the same
two runs without it; the control adds no more than a second run of each system.

Every system runs with and without recording, in turns, in one host process that traces once: so both sides have
the same caches and the same neighbours, and what differs is recording alone. "Without" is a rank whose recorder
takes no digest and writes no row. A last run with controls shows what they add; comparing them is in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from cases import all_cases
from harness import host, worker
from harness.capture.recorder import Recorder
from harness.capture.store import read_recording
from harness.case import Case
from harness.case_run import CaseRun
from harness.compare.verdict import compare
from harness.determinism import set_determinism
from harness.devices import Placement
from harness.records import Verdict
from harness.run_options import ROLES, OnEvent, Role, RunOptions
from harness.select import select

COMPARISON_BUDGET = 0.10


class Silence(Recorder):
    """A recorder that takes nothing."""

    def observe(self, kind: Any, name: str, tensor: Any) -> None:
        """Take nothing."""


@dataclass
class InProcess:
    """A desk that answers in this process, as the host does, and keeps each answer's time."""

    run_dir: Path
    work: Path
    answerer: host.Host
    seconds: dict[str, float]

    def ask(self, request: dict[str, Any], timeout: float, on_event: OnEvent) -> dict[str, Any]:
        """One request. A run's recording replaces the one before."""
        began = time.perf_counter()
        answer = self.answerer.answer(request)
        self.seconds[f"{request['system']}.{request['arm']}"] = time.perf_counter() - began
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="expression", default="transformer_batch or moe_batch or moe_seq")
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs of each system")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--world-size", type=int)
    options = parser.parse_args()
    _keep_standard_input_open()
    worker.preload()
    set_determinism(0)
    host.warm_up()
    comparisons, controls = [], []
    for case in select(all_cases(), options.expression):
        case = replace(case, steps=options.steps or case.steps)
        if options.world_size:
            case = replace(case, parallelism=replace(case.parallelism, world_size=options.world_size))
        with tempfile.TemporaryDirectory() as folder:
            desk = InProcess(Path(folder), Path(folder) / "work", host.Host(lambda event: None), {})
            comparisons.append(measure_comparison(case, desk, options.runs))
            controls.append(measure_control(case, desk))
    print(f"the comparison, medians of {options.runs} pairs of runs, in seconds (budget {COMPARISON_BUDGET:.0%}):")
    print(tabulate(comparisons, headers="keys", floatfmt=".2f"))
    print("\nthe control, in seconds (budget: it adds no more than a second run of each system):")
    print(tabulate(controls, headers="keys", floatfmt=".2f"))
    if any(row["within"] == "no" for row in comparisons + controls):
        sys.exit("over budget")


def measure_comparison(case: Case, desk: InProcess, runs: int) -> dict[str, Any]:
    """Both systems with and without recording, in turns; the first of each, which traces, is thrown away."""
    run = CaseRun(case, Placement(), desk, RunOptions(device="cpu", timeout=3600.0), lambda event: None)
    rows: list[dict[str, float]] = []
    for index in range(runs + 1):
        row = {"without": 0.0, "with": 0.0, "steps without": 0.0, "steps with": 0.0}
        for role in ROLES:
            turns = [("without", silence), ("with", nullcontext)]
            for name, arm in turns if index % 2 else reversed(turns):
                with arm():
                    wall, steps = record_once(run, desk, role)
                row[name] += wall
                row[f"steps {name}"] += steps
        rows.append(row | {"compare": compare_once(run, case)})
    medians = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    cost = statistics.median(row["steps with"] - row["steps without"] for row in rows[1:])
    whole = statistics.median(row["with"] - row["without"] for row in rows[1:])
    share = (whole + medians["compare"]) / medians["steps without"]
    return {
        "case": case.name,
        "steps without": medians["steps without"],
        "steps with": medians["steps with"],
        "recording in steps": cost,
        "recording and writing": whole,
        "compare": medians["compare"],
        "share of steps": f"{share:.1%}",
        "within": "yes" if share <= COMPARISON_BUDGET else "no",
    }


def record_once(run: CaseRun, desk: InProcess, role: Role) -> tuple[float, float]:
    """Seconds of one run, start and end of its ranks included, and of its steps alone."""
    answer = run.record(role, "first")
    return desk.seconds[f"{getattr(run.case, role)}.first"], answer["seconds"]["steps"]


def compare_once(run: CaseRun, case: Case) -> float:
    """Seconds to read both recordings and compare them; that all agrees is checked, or the figures mean nothing."""
    began = time.perf_counter()
    reference, candidate = (read_recording(run._recording(role, "first")) for role in ROLES)
    found = compare(reference, candidate, case)
    seconds = time.perf_counter() - began
    assert found.verdict == Verdict.EQUAL, "a benchmark of systems that differ measures something else"
    return seconds


def measure_control(case: Case, desk: InProcess) -> dict[str, Any]:
    """A case without and with controls: what they add, against the time of their runs."""
    totals, runs = {}, {}
    for control in ("never", "always"):
        desk.seconds.clear()
        began = time.perf_counter()
        options = RunOptions(device="cpu", timeout=3600.0, control=control)
        result = CaseRun(case, Placement(), desk, options, lambda event: None).result()
        totals[control] = time.perf_counter() - began
        assert result.verdict == Verdict.EQUAL, result.error
        runs[control] = dict(desk.seconds)
    first = sum(seconds for name, seconds in runs["always"].items() if name.endswith(".first"))
    second = sum(seconds for name, seconds in runs["always"].items() if name.endswith(".control"))
    added = totals["always"] - first - (totals["never"] - sum(runs["never"].values()))
    return {
        "case": case.name,
        "without": totals["never"],
        "with": totals["always"],
        "first runs": first,
        "second runs": second,
        "added": added,
        "of which comparing": added - second,
        "within": "yes" if added <= totals["never"] else "no",
    }


@contextmanager
def silence() -> Iterator[None]:
    """Ranks that record nothing, and a host that joins nothing."""
    before = worker.Recorder, worker.write_part, host.join_recording
    worker.Recorder, worker.write_part = Silence, lambda path, rows: None
    host.join_recording = lambda *arguments: None
    try:
        yield
    finally:
        worker.Recorder, worker.write_part, host.join_recording = before


def _keep_standard_input_open() -> None:
    """The host's ranks end when its standard input does: give it one that lasts as long as this process."""
    reader, _ = os.pipe()
    os.dup2(reader, 0)


if __name__ == "__main__":
    main()
