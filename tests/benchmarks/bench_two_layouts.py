"""Recordings of many ranks in two layouts, compared as a run compares them, without a rank that runs.

    python tests/benchmarks/bench_two_layouts.py [--ranks N] [--steps N] [--tensors N] [--scratch DIR]

The reference's ranks hold rows of each tensor, the candidate's twice as many rows and half of the columns, so that each
rank has two cells of each tensor. Shown are CPU seconds and the peak of memory of a process that decides whether two
systems of one layout have two, and of one that compares two layouts: equal ones, and ones with a cell that differs.
Returns 1 where one of these did not find what it should.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from bitproof.harness.capture.recording_files import join_parts, read_recording, write_part
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare.part_layouts import have_different_layouts
from bitproof.harness.powers.two_layouts.across import compare_layouts
from bitproof.harness.records import Key, Manifest, Record
from bitproof.harness.records.layout import Box
from tests.benchmarks.bench_ranks import key_of, measured

ROWS, COLUMNS = 128, 512


def case_of(options: argparse.Namespace) -> Case:
    """The case that both sides are said to have recorded."""
    base = Case(name="two_layouts", family="simulated", reference="eager", candidate="eager", steps=options.steps)
    return replace(base, parallelism=Parallelism(world_size=options.ranks, ep=1))


def rows_of(rank: int, side: str, options: argparse.Namespace) -> Iterator[tuple[Key, Record]]:
    """What a rank records: a loss, and parts of tensors with the digests of their cells."""
    down, across = ([rank], [0, 1]) if side == "reference" else ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2])
    runs = (ROWS * down[0], ROWS * (down[-1] + 1)), (COLUMNS * across[0], COLUMNS * (across[-1] + 1))
    box = Box((ROWS * options.ranks, COLUMNS * 2), ((runs[0],), (runs[1],)))
    for step in range(options.steps):
        for number in range(options.tensors):
            if number == 0:
                one = hashlib.md5(f"{step}".encode()).hexdigest()
                yield key_of(step, number, rank), Record(one, "bfloat16", (), "0x1.8000000000000p+1")
                continue
            other = side == "one" and (rank, step, number) == (options.ranks // 2, 1, 7)
            named = [f"{step} {number} {row} {column} {other}" for row in down for column in across]
            cells = [hashlib.md5(name.encode()).hexdigest() for name in named]
            whole = hashlib.md5("".join(cells).encode()).hexdigest()
            placed = (None, None, "by hand", str(box), "".join(cells))
            yield key_of(step, number, rank), Record(whole, "bfloat16", box.local_shape, *placed)


def record(folder: Path, side: str, options: argparse.Namespace) -> None:
    """Write a side's parts and join them to a recording."""
    parts = [folder / f"{side}.parts" / f"rank{rank}.parquet" for rank in range(options.ranks)]
    for rank, path in enumerate(parts):
        write_part(path, rows_of(rank, side, options))
    case = case_of(options).to_dict()
    join_parts(
        folder / side, Manifest(case=case, system="eager", steps=options.steps, world_size=options.ranks), parts, []
    )


def decide(folder: Path, side: str, options: argparse.Namespace) -> None:
    """Whether a side has the candidate's layout, as a run asks before it compares."""
    sides = [read_recording(folder / name) for name in (side, "equal")]
    assert have_different_layouts(case_of(options), *sides) == (side == "reference")


def compared(folder: Path, side: str, options: argparse.Namespace) -> None:
    """Compare the two layouts."""
    folders = {"reference": folder / "reference", "candidate": folder / side}
    firsts = {role: read_recording(path) for role, path in folders.items()}
    found = compare_layouts(case_of(options), firsts, lambda role, arm, how: folders[role], read_recording, None)
    records = options.ranks * options.tensors * options.steps
    assert sum(found.comparison.compared.values()) == records, found.comparison.reason
    assert sum(found.comparison.mismatched.values()) == (side == "one"), found.comparison
    assert found.layouts.across == (options.tensors - 1) * options.steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--scratch", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch)
        for side in ("reference", "equal", "one"):
            record(folder, side, options)
        for what, side in ((decide, "one"), (decide, "reference"), (compared, "equal"), (compared, "one")):
            rows.append((f"{what.__name__}: {side}", *measured(what, folder, side, options)))
            print(*rows[-1], flush=True)
    print(tabulate(rows, headers=["stage", "seconds", "CPU seconds", "peak GiB"], tablefmt="grid"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
