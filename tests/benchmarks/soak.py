"""Many runs in one process: `python tests/benchmarks/soak.py [--runs N] [--session N] [--controls N] [--steps N]`.

    runs       that many runs of a small case on 2 ranks, each with a host of its own, as a program does that calls
               bitproof again and again
    session    that many runs of it over one host, as one call does that has many cases
    controls   that many runs of the three main cases on 8 ranks, each system twice: `steps` steps

Every verdict must be EQUAL, with equal controls. The resident memory of this process, and of the host of a session,
must stay flat: its median over the last fifth of the runs may be larger by MAX_GROWTH MiB than over the second fifth;
the first one loads what is loaded once. Of this process it is what is left when allocators have given back what nobody
uses, which they keep by the luck of what lies where: up to 10 MiB more or less from one run to the next. In the end no
process, descriptor, temporary file or shared memory of ours may be left. Ends with 1 where anything of
this is not so; prints what it saw.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pyarrow as pa

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case, Model, Parallelism
from bitproof.harness.execute import launch
from bitproof.harness.options import RunOptions
from bitproof.harness.records import CaseResult, Event, Verdict
from bitproof.harness.runtime.disk_cache import default_folder
from tests.figures import figure

MAX_GROWTH = 4.0
"""MiB."""

MIN_JUDGED = 20
"""Fewer runs say nothing of growth: a fifth of them is too few for a median."""

MAIN = ("transformer_batch", "moe_batch", "moe_seq")
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int | str = "self") -> float:
    """Resident memory of a process, in MiB; 0 for one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 2**20
    except OSError:
        return 0.0


def held() -> float:
    """Resident memory of this process, in MiB, without what allocators keep for later."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return resident()


def children() -> list[int]:
    """This process's own children."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def growth(samples: Sequence[float]) -> float | None:
    """By how much the median of the last fifth is larger than that of the second; None for too few samples."""
    if len(samples) < MIN_JUDGED:
        return None
    fifth = len(samples) // 5
    return statistics.median(samples[-fifth:]) - statistics.median(samples[fifth : 2 * fifth])


def faults_of(result: CaseResult) -> list[str]:
    """What is not as it must be in a result."""
    is_steady = not set(result.control.values()) - {None, "EQUAL"}
    if result.verdict == Verdict.EQUAL and is_steady:
        return []
    return [f"{result.case.name}: {result.verdict}: {result.error}"]


class Soak:
    """What was run so far, and what is wrong with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wrong: list[str] = []
        self.verdicts = Counter[Verdict]()

    def part(self, name: str, judged: Callable[[list[float]], Iterator[CaseResult]], *, of: str) -> None:
        """Run a part, which appends samples of the memory of `of`, and print a line of it."""
        began, cpu = time.monotonic(), _cpu_seconds()
        samples: list[float] = []
        verdicts, wrong = Counter[Verdict](), list[str]()
        for result in judged(samples):  # of which none is kept: this process is to stay as it is
            verdicts[result.verdict] += 1
            wrong += faults_of(result)
        self.verdicts += verdicts
        grown = growth(samples)
        text = "too few to judge" if grown is None else f"{grown:+.1f} MiB"
        came_to = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        print(
            f"{name}: {verdicts.total()} runs: {came_to or 'none'}; memory of {of} {min(samples, default=0):.1f} to "
            f"{max(samples, default=0):.1f} MiB, {text}; {time.monotonic() - began:.0f} s, "
            f"{_cpu_seconds() - cpu:.0f} s of CPU",
            flush=True,
        )
        self.wrong += [f"{name}: {fault}" for fault in wrong]
        if grown is not None and grown > MAX_GROWTH:
            self.wrong.append(f"{name}: the memory of {of} grew by {grown:.1f} MiB, by more than {MAX_GROWTH:g}")

    def run(self, cases: Sequence[Case], samples: list[float], *, of_host: bool) -> Iterator[CaseResult]:
        """Run cases over one host."""
        control = "always" if cases[0].parallelism.world_size > 2 else "never"
        options = RunOptions(device="cpu", control=control, kept_graphs=default_folder())  # type: ignore[arg-type]
        hosts: list[int] = []

        def on_event(event: Event) -> None:
            hosts[:] = hosts or children()

        with tempfile.TemporaryDirectory(dir=self.folder) as run_dir:
            for result in launch.run_cases(cases, options, Path(run_dir), on_event):
                samples.append(max(map(resident, hosts), default=0.0) if of_host else held())
                yield result


def left_behind(before: set[str], temporary: Path) -> list[str]:
    """What is there that was not before: see the top."""
    found = [f"process {pid}" for pid in children()]
    found += [f"temporary {path.name}" for path in temporary.iterdir()]
    return found + sorted((_descriptors() | _shared()) - before)


def _descriptors() -> set[str]:
    return {f"descriptor {name}" for name in os.listdir("/proc/self/fd")}


def _shared() -> set[str]:
    return {f"shared memory {name}" for name in os.listdir("/dev/shm")} if Path("/dev/shm").is_dir() else set()


def _cpu_seconds() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--session", type=int, default=300)
    parser.add_argument("--controls", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args(arguments)
    model = Model(layers=1, dense_layers=0)
    case = replace(CASES["moe_seq"], name="soak", model=model, parallelism=Parallelism(world_size=2), steps=2)
    with tempfile.TemporaryDirectory(prefix="bitproof-soak-") as name:
        folder, temporary = Path(name), Path(name) / "tmp"
        temporary.mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        soak, before = Soak(folder), _descriptors() | _shared()

        def one_by_one(samples: list[float]) -> Iterator[CaseResult]:
            for _ in range(chosen.runs):
                yield from soak.run([case], samples, of_host=False)

        def in_one_session(samples: list[float]) -> Iterator[CaseResult]:
            cases = [replace(case, name=f"soak_{number}") for number in range(chosen.session)]
            yield from soak.run(cases, samples, of_host=True) if cases else ()

        def controls(samples: list[float]) -> Iterator[CaseResult]:
            for number in range(chosen.controls):
                cases = [replace(CASES[name], name=f"{name}_{number}", steps=chosen.steps) for name in MAIN]
                yield from soak.run(cases, samples, of_host=False)

        soak.part("runs", one_by_one, of="this process")
        soak.part("session", in_one_session, of="the host")
        soak.part("controls", controls, of="this process")
        soak.wrong += [f"left behind: {what}" for what in left_behind(before, temporary)]
        tempfile.tempdir = None
        del os.environ["TMPDIR"]
    for text in soak.wrong:
        print(f"FOUND: {text}")
    print("all EQUAL, nothing left behind" if not soak.wrong else f"{len(soak.wrong)} findings")
    is_whole = (chosen.runs, chosen.session, chosen.controls) == (300, 300, 50)
    num = soak.verdicts.total()
    missed = figure("soak" if is_whole else "soak.short", soak.verdicts[Verdict.EQUAL] / num if num else math.nan)
    return int(bool(soak.wrong or missed))


if __name__ == "__main__":
    sys.exit(main())
