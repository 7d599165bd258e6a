"""What the comparison costs, and what the control adds to it.

    python tests/benchmarks/bench_comparison.py [-k EXPR] [--runs N] [--steps N] [--world-size N] [--layouts]

Budgets: recording every kind at every step on every rank, and comparing all of it, costs 10 % or less of the same
two runs without it; the control adds no more than a second run of each system, compared within the same 10 %.

Every system runs with and without recording, in turns, in one host process that traces once: so both sides have
the same caches and the same neighbours, and what differs is recording alone. "Without" is a rank whose recorder
takes no digest and writes no row. A last run with controls shows what they add; comparing them is in it.

CPU seconds of all processes stand beside those of the clock: they tell more where others use the machine too.

`--layouts` measures another thing: a loop under FSDP against itself, under HSDP against itself, each with its control,
and under FSDP against HSDP, whose tensors lie otherwise, on 2, 4 and 8 ranks. Budgets: across layouts a case takes at
most twice the CPU seconds of one within a layout (the mean of both), and what takes part in it no more memory on 8
ranks than a tenth more than on 2.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.builtin_cases import all_cases
from bitproof.builtin_cases.layouts.two_layouts import ddp_fsdp
from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.capture.recording_files import warm_up
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.case.select import select
from bitproof.harness.compare.verdict import compare
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.execute.host import answerer, worker
from bitproof.harness.execute.host.answerer import Answerer
from bitproof.harness.execute.requests import Request, RunRequest
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import ROLES, OnEvent, RunOptions
from bitproof.harness.records import CaseResult, Verdict
from tests.figures import figure

COMPARISON_BUDGET = 0.10

A = TypeVar("A")


class Silence(Recorder):
    """A recorder that takes nothing."""

    def observe(self, kind: Any, name: str, tensor: Any) -> None:
        """Take nothing."""


class Times(NamedTuple):
    """Seconds of the clock, and of all CPUs in this process and its children that have ended."""

    clock: float
    cpu: float

    def __sub__(self, other: tuple[float, ...]) -> Times:
        return Times(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    def __add__(self, other: tuple[Any, ...]) -> Times:
        return Times(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def now() -> Times:
    """Times so far."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Times(time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in usages))


@dataclass
class InProcess:
    """A client that answers in this process, as the host does, and keeps each run's times by system and arm."""

    run_dir: Path
    work: Path
    answerer: Answerer
    runs: dict[str, Times]

    def place(self, case: Case) -> Placement:
        """Always on the CPU."""
        return Placement()

    def announce(self, result: CaseResult) -> None:
        """Nobody follows."""

    def ask(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        """One request. A run's recording replaces the one before."""
        began = now()
        answer = self.answerer.answer(request)
        if isinstance(request, RunRequest):
            self.runs[f"{request.system}.{request.arm}"] = now() - began
        return answer


def main() -> int:
    """Measure and print; 1 if the comparison misses its goal or the control is over budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="expression", default="transformer_batch or moe_batch or moe_seq")
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs of each system")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--layouts", action="store_true")
    options = parser.parse_args()
    _keep_standard_input_open()
    worker.preload()
    set_determinism(0)
    warm_up()
    if options.layouts:
        problem = print_layouts(options.runs, options.steps or 3)
        print(problem or "within budget")
        return int(problem is not None)
    comparisons, controls = [], []
    for case in select(all_cases(), options.expression):
        case = replace(case, steps=options.steps or case.steps)
        if options.world_size:
            case = replace(case, parallelism=replace(case.parallelism, world_size=options.world_size))
        with tempfile.TemporaryDirectory() as folder:
            client = InProcess(Path(folder), Path(folder) / "work", Answerer(lambda event: None), {})
            comparisons += measure_comparison(case, client, options.runs)
            controls += measure_control(case, client)
    print(f"{os.getloadavg()[0]:.1f} processes wanted to run at the end, on {os.cpu_count()} cores\n")
    print(f"the comparison, medians of {options.runs} pairs of runs, in seconds (budget {COMPARISON_BUDGET:.0%}):")
    print(tabulate(comparisons, headers="keys", floatfmt=".2f"))
    budget = f"a second run of each system, compared within the same {COMPARISON_BUDGET:.0%}"
    print(f"\nthe control, in seconds (budget: {budget}):")
    print(tabulate(controls, headers="keys", floatfmt=".2f"))
    shares = [float(row["share"].rstrip("%")) / 100 for row in comparisons]
    is_over = any(row["within"] == "no" for row in controls)
    return figure("bench.comparison", max(shares)) or int(is_over)


def measure_comparison(case: Case, client: InProcess, runs: int) -> list[dict[str, Any]]:
    """Both systems with and without recording, in turns; the first of each, which traces, is thrown away."""
    run = CaseRun(case, Placement(), client, RunOptions(device="cpu", timeout=3600.0), lambda event: None)
    without, recording, comparing = [], [], []
    for index in range(runs + 1):
        walls = {"without": Times(0, 0), "with": Times(0, 0)}
        turns = [("without", silence), ("with", nullcontext)]
        for role in ROLES:
            for name, arm in turns if index % 2 else reversed(turns):
                with arm():
                    run.record(role, "first")
                walls[name] += client.runs[f"{getattr(case, role)}.first"]
        without.append(walls["without"])
        recording.append(walls["with"] - walls["without"])
        comparing.append(compare_once(run, case))
    columns = (without, recording, comparing)
    medians = [[statistics.median(times[place] for times in column[1:]) for column in columns] for place in range(2)]
    return [comparison_row(case, clock, *found) for clock, found in zip(Times._fields, medians, strict=True)]


def comparison_row(case: Case, clock: str, without: float, recording: float, comparing: float) -> dict[str, Any]:
    """One line: what is added to both systems' runs, tracing left out."""
    share = (recording + comparing) / without
    return {
        "case": case.name,
        "seconds of": clock,
        "runs without": without,
        "recording adds": recording,
        "comparing adds": comparing,
        "share": f"{share:.1%}",
        "within": "yes" if share <= COMPARISON_BUDGET else "no",
    }


def compare_once(run: CaseRun, case: Case) -> Times:
    """Reading both recordings and comparing them; that all agrees is checked, or the figures mean nothing."""
    began = now()
    reference, candidate = (run.recording(role) for role in ROLES)
    found = compare(reference, candidate, case)
    times = now() - began
    assert found.verdict == Verdict.EQUAL, "a benchmark of systems that differ measures something else"
    return times


def measure_control(case: Case, client: InProcess) -> list[dict[str, Any]]:
    """A case with controls: what they add, and of that their runs, against the case without."""
    total, first, second = {}, {}, {}
    for control in ("never", "always"):
        client.runs.clear()
        began = now()
        options = RunOptions(device="cpu", timeout=3600.0, control=control)
        result = CaseRun(case, Placement(), client, options, lambda event: None).result()
        total[control] = now() - began
        assert result.verdict == Verdict.EQUAL, result.error
        first[control], second[control] = (
            sum((times for name, times in client.runs.items() if name.endswith(arm)), Times(0, 0))
            for arm in (".first", ".control")
        )
    beside_runs = {control: total[control] - first[control] - second[control] for control in total}
    added = second["always"] + (beside_runs["always"] - beside_runs["never"])
    return [
        {
            "case": case.name,
            "seconds of": clock,
            "without": total["never"][place],
            "second runs": second["always"][place],
            "comparing them": (added - second["always"])[place],
            "control adds": added[place],
            "against second runs": f"{added[place] / second['always'][place]:.1%}",
            "within": "yes" if added[place] <= (1 + COMPARISON_BUDGET) * second["always"][place] else "no",
        }
        for place, clock in enumerate(Times._fields)
    ]


class OfLayouts(NamedTuple):
    """What one case took: CPU seconds of all processes, the most MiB of the process that compares, and of a rank."""

    cpu: float
    host_mib: float
    rank_mib: float


PAIRS = ("fsdp", "fsdp"), ("hsdp", "hsdp"), ("fsdp", "hsdp")


def print_layouts(runs: int, steps: int) -> str | None:
    """The table of `--layouts`, medians of some runs in turns; what is over budget."""
    rows, over, mib = [], [], {}
    for ranks in (2, 4, 8):
        turns = [[in_a_process_of_its_own(pair, ranks, steps) for pair in PAIRS] for _ in range(runs)]
        fsdp, hsdp, across = (
            OfLayouts(*map(statistics.median, zip(*taken, strict=True))) for taken in zip(*turns, strict=True)
        )
        ratios = sorted(2 * turn[2].cpu / (turn[0].cpu + turn[1].cpu) for turn in turns)
        ratio = statistics.median(ratios)
        mib[ranks] = across[1:]
        rows.append(
            {
                "ranks": ranks,
                "CPU s fsdp": fsdp.cpu,
                "hsdp": hsdp.cpu,
                "across": across.cpu,
                "ratio": f"{ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                "host MiB within": fsdp.host_mib,
                "host across": across.host_mib,
                "rank MiB within": fsdp.rank_mib,
                "rank across": across.rank_mib,
            }
        )
        over += [f"{ranks} ranks take {ratio:.2f} times"] if ratio > 2 else []
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    for name, few, many in zip(("the process that compares", "a rank"), mib[2], mib[8], strict=True):
        print(f"{name}: {many / few - 1:+.1%} on 8 ranks against 2")
        over += [f"{name} grows"] if many > 1.1 * few else []
    return f"over budget: {', '.join(over)}" if over else None


def in_a_process_of_its_own(pair: tuple[str, str], ranks: int, steps: int) -> OfLayouts:
    """A case of `mesh_loop`, in a process whose memory nobody else has used."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, " ".join(map(str, measure_layout(*pair, ranks, steps))).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        found = said.read()
    assert os.waitpid(child, 0)[1] == 0, "the measured process failed"
    return OfLayouts(*map(float, found.split()))


def measure_layout(reference: str, candidate: str, ranks: int, steps: int) -> OfLayouts:
    """One case with its control; that it ends as it should is checked."""
    way, loop = Parallelism(world_size=ranks, ep=1), "bitproof.builtin_cases.examples.mesh_loop"
    base = replace(ddp_fsdp, reference=f"{loop}:{reference}", candidate=f"{loop}:{candidate}", steps=steps)
    case = replace(base, parallelism=way, reference_parallelism=None if candidate == reference else way)
    began = now().cpu
    with tempfile.TemporaryDirectory() as folder:
        client = InProcess(Path(folder), Path(folder) / "work", Answerer(lambda event: None), {})
        options = RunOptions(device="cpu", timeout=3600.0, control="always")
        result = CaseRun(case, Placement(), client, options, lambda event: None).result()
    assert result.verdict in (Verdict.EQUAL, Verdict.CLOSE), result.error
    assert bool(result.layouts) == (candidate != reference), "tensors lie otherwise"
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return OfLayouts(now().cpu - began, *peaks)


@contextmanager
def silence() -> Iterator[None]:
    """Ranks that record nothing, and a host that joins nothing."""
    before = worker.Recorder, worker.write_part, answerer.join_recording
    worker.Recorder, worker.write_part = Silence, lambda path, rows: None
    answerer.join_recording = lambda *arguments: None
    try:
        yield
    finally:
        worker.Recorder, worker.write_part, answerer.join_recording = before


def _keep_standard_input_open() -> None:
    """The host's ranks end when its standard input does: give it one that lasts as long as this process."""
    reader, _ = os.pipe()
    os.dup2(reader, 0)


if __name__ == "__main__":
    sys.exit(main())
