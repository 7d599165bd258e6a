"""A thousand ranks' recordings: joined, read, compared, judged and reported, without a rank that runs.

    python tests/benchmarks/bench_ranks.py [--ranks N] [--steps N] [--tensors N] [--scratch DIR]

Budget: 1,024 ranks of 20 steps and 1,000 tensors, 20 million records a side, are compared, judged and reported in a
minute and 2 GiB on two cores. The ranks' parts are written as ranks write them, then joined as a run joins them. Three
pairs are compared: equal ones, ones of which a record on a rank in the middle differs, and ones that all differ. Each
stage runs in a process of its own, whose peak of memory and CPU seconds are shown beside those of the clock. Returns 1
where comparing, judging and reporting takes more CPU seconds or memory than that.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness.capture.recording_files import join_parts, read_recording, write_part
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare.outcome import result_of
from bitproof.harness.compare.part_layouts import have_different_layouts
from bitproof.harness.compare.verdict import compare, demand_substance, judgement_of
from bitproof.harness.localize.differing import differing_digests
from bitproof.harness.localize.search import held_as
from bitproof.harness.records import Key, Manifest, Record, Report
from bitproof.harness.report.write import prepare_run_dir, write_run
from tests.figures import figure

KINDS = ("grad", "param", "optimizer")
BUDGET_GIB = 2


def case_of(options: argparse.Namespace) -> Case:
    """The case that both sides are said to have recorded."""
    base = Case(name="thousand_ranks", family="simulated", reference="eager", candidate="eager", steps=options.steps)
    return replace(base, parallelism=Parallelism(world_size=options.ranks, ep=1))


def key_of(step: int, number: int, rank: int) -> Key:
    """The key of a tensor by its number."""
    if number == 0:
        return Key(step, "loss", "loss", rank)
    parameter = (number - 1) // 3
    name = f"layers.{parameter // 4}.attention.projection_{parameter % 4}.weight"
    return Key(step, KINDS[number % 3], name, rank)


def rows_of(rank: int, side: str, options: argparse.Namespace) -> Iterator[tuple[Key, Record]]:
    """What a rank records: a loss, and gradients, parameters and states of tensors with a large model's names."""
    for step in range(options.steps):
        for number in range(options.tensors):
            is_other = side == "all" or (side == "one" and (rank, step, number) == (options.ranks // 2, 1, 7))
            digest = hashlib.md5(f"{rank} {step} {number} {is_other}".encode()).hexdigest()
            value = "0x1.8000000000000p+1" if number == 0 else None
            yield key_of(step, number, rank), Record(digest, "bfloat16", (128, 512), value)


def parts_of(folder: Path, side: str, options: argparse.Namespace) -> list[Path]:
    """A side's parts, a file a rank."""
    return [folder / f"{side}.parts" / f"rank{rank}.parquet" for rank in range(options.ranks)]


def write(folder: Path, side: str, options: argparse.Namespace) -> None:
    """Write a side's parts. One that hardly differs from the reference has links to the reference's parts."""
    shared = {} if side in ("reference", "all") else dict(enumerate(parts_of(folder, "reference", options)))
    if side == "one":
        del shared[options.ranks // 2]
    for rank, path in enumerate(parts_of(folder, side, options)):
        if rank in shared:
            path.parent.mkdir(exist_ok=True)
            path.hardlink_to(shared[rank])
        else:
            write_part(path, rows_of(rank, side, options))


def join(folder: Path, side: str, options: argparse.Namespace) -> None:
    """Join a side's parts to a recording."""
    manifest = Manifest(case=case_of(options).to_dict(), system="eager", steps=options.steps, world_size=options.ranks)
    join_parts(folder / side, manifest, parts_of(folder, side, options))


def report(folder: Path, side: str, options: argparse.Namespace) -> None:
    """Read both sides, compare and judge them, and write the report, as `case_run` does."""
    case = case_of(options)
    reference, candidate = read_recording(folder / "reference"), read_recording(folder / side)
    assert not have_different_layouts(case, reference, candidate)
    comparison = compare(reference, candidate, case)
    losses = {"reference": reference.losses(), "candidate": candidate.losses()}
    result = result_of(case, judgement_of(demand_substance(comparison)), device="cpu", backend="gloo", losses=losses)
    run_dir = prepare_run_dir(folder / "reports")
    write_run(Report(run_id=run_dir.name, exit_status=0, environment={}, cases=[result]), run_dir)
    print(f"  {side}: {result.verdict}, {sum(result.compared.values())} compared, {comparison.mismatched}", flush=True)


def search(folder: Path, side: str, options: argparse.Namespace) -> None:
    """What a search for the cause asks of both sides."""
    key = key_of(1, 7, options.ranks // 2)
    reference, candidate = read_recording(folder / "reference"), read_recording(folder / side)
    differing = differing_digests(reference, candidate, key.step)
    held = held_as(reference, candidate, key)
    print(f"  {side}: {sum(map(len, differing.values()))} differ on {len(differing)} ranks, {held}", flush=True)


def measured(what: Callable[..., None], *arguments: Any) -> tuple[str, str, str]:
    """Seconds by the clock and of the CPU, and the peak of memory in GiB, of a call in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process, began = context.Process(target=_measure, args=(sender, what, arguments)), time.perf_counter()
    process.start()
    sender.close()
    cpu, peak = receiver.recv()
    process.join()
    return f"{time.perf_counter() - began:.1f}", f"{cpu:.1f}", f"{peak:.2f}"


def _measure(sender: Any, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    what(*arguments)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    sender.send((usage.ru_utime + usage.ru_stime, usage.ru_maxrss / (1 << 20)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tensors", type=int, default=1000, help="a loss, and three for each parameter")
    parser.add_argument("--scratch", type=Path)
    options = parser.parse_args()
    rows, seconds_of_cpu, missed = [], [], False
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch)
        for side in ("reference", "equal", "one", "all"):
            write(folder, side, options)
            found = measured(join, folder, side, options)
            size = (folder / side / "digests.parquet").stat().st_size / (1 << 20)
            rows.append((f"join {side}", *found, f"{size:.0f} MiB"))
            print(*rows[-1], flush=True)
            if side != "reference":
                seconds, cpu, peak = measured(report, folder, side, options)
                rows.append((f"compare, judge, report: {side}", seconds, cpu, peak, ""))
                print(*rows[-1], flush=True)
                seconds_of_cpu.append(float(cpu))
                missed = missed or float(peak) > BUDGET_GIB
            if side in ("one", "all"):
                rows.append((f"what a search asks: {side}", *measured(search, folder, side, options), ""))
                print(*rows[-1], flush=True)
    print(tabulate(rows, headers=["stage", "seconds", "CPU seconds", "peak GiB", "on disk"], tablefmt="grid"))
    if missed:
        print(f"MISSED: {BUDGET_GIB} GiB to compare, judge and report")
    return figure("bench.ranks", max(seconds_of_cpu)) or int(missed)


if __name__ == "__main__":
    sys.exit(main())
