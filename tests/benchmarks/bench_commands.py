"""How long whole commands take, from start to exit: `python tests/benchmarks/bench_commands.py [NAME ...]`.

    --turns N          each command so often, 3 unless told; medians count
    --beside PYTHON    run another checkout's command in turn with ours, and tell the ratio

| name       | command                                                     | budget, on 2 cores              |
|------------|-------------------------------------------------------------|---------------------------------|
| no-control | `run --no-control` of the three cases                       | 45 s                            |
| control    | `run` of the three cases                                    | 2.1 times faster than before    |
| bisect     | `bisect` of the example in docs/how-to/localizing.md               | twice as fast as before         |
| shrink     | `shrink` of the example there                               | 60 s                            |
| others     | `run -j 2 --control when-different` of 66 other cases, once | 7 min                           |

"Before" is before ranks of one machine met in shared memory; those 66 cases are the ones that were there then.
`others` runs when it is named. Graphs are kept from one turn to the next, in a folder of the benchmark's own, which a
turn that is not counted fills.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures import figure

THREE = "transformer_batch or moe_batch or moe_seq"
LATER = (
    "sight or tp_ep or bucketed_float32 or bucketed_bf16_reduce or (regional and not regional_inductor) or marked or "
    "halves or joint or precompiled or autoplace or debug"
)
PASS = "cases/examples/extra_passes.py:add_gradients_in_bfloat16"


class Command(NamedTuple):
    """What is run, the status that it ends with, and its budget."""

    words: tuple[str, ...]
    status: int
    budget: str


COMMANDS = {
    "no-control": Command(("run", "-k", THREE, "--no-control"), 0, "45 s"),
    "control": Command(("run", "-k", THREE), 0, "2.1 times"),
    "bisect": Command(("bisect", "moe_batch", "--world-size", "2", "--steps", "2", "--extra-pass", PASS), 1, "2 times"),
    "shrink": Command(("shrink", "transformer_batch", "--extra-pass", PASS), 1, "60 s"),
    "others": Command(("run", "-j", "2", "--control", "when-different", "-k", f"not ({THREE} or {LATER})"), 0, "420 s"),
}


def main() -> int:
    """Measure and print; 1 if `shrink` misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--beside", metavar="PYTHON", help="of another checkout, whose command is run in turn with ours"
    )
    options = parser.parse_args()
    names = options.names or [name for name in COMMANDS if name != "others"]
    if unknown := set(names) - set(COMMANDS):
        parser.error(f"no command {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS)}")
    pythons = [sys.executable, *([options.beside] if options.beside else [])]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            rows.append(row(name, pythons, 1 if name == "others" else options.turns, Path(folder)))
            print(tabulate(rows[-1:], headers="keys", floatfmt=".2f"), flush=True)
    print(f"\nmedians of {options.turns} turns, in seconds:")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    return max(
        [figure("bench.commands", float(str(row["seconds"]))) for row in rows if row["command"] == "shrink"] or [0]
    )


def row(name: str, pythons: list[str], turns: int, folder: Path) -> dict[str, object]:
    """One command's figures."""
    command = COMMANDS[name]
    for python in pythons:
        seconds_of(command, python, folder)  # fills the folder of graphs, and is not counted
    taken: dict[str, list[float]] = {python: [] for python in pythons}
    for _ in range(turns):
        for python in pythons:
            taken[python].append(seconds_of(command, python, folder))
    own, *others = [statistics.median(seconds) for seconds in taken.values()]
    spread = f"{min(taken[pythons[0]]):.1f} to {max(taken[pythons[0]]):.1f}"
    found: dict[str, object] = {"command": name, "seconds": own, "from, to": spread, "budget": command.budget}
    if others:
        found |= {"beside": others[0], "times": others[0] / own}
    return found


def seconds_of(command: Command, python: str, folder: Path) -> float:
    """One run of the command by a Python's own checkout, from its start to its exit."""
    where = [python, "-c", "from bitproof import harness; print(harness.__file__)"]
    checkout = Path(subprocess.check_output(where, cwd=folder, text=True).strip()).parents[1]
    cache = folder / "cache" / checkout.as_posix().replace("/", "_")
    with tempfile.TemporaryDirectory() as reports:
        began = time.monotonic()
        done = subprocess.run(
            [python, "-m", "bitproof", *command.words, "--report-dir", reports],
            cwd=checkout,
            env=os.environ | {"BITPROOF_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
    assert done.returncode == command.status, f"a benchmark of a failing run measures nothing:\n{done.stdout}"
    return seconds


if __name__ == "__main__":
    sys.exit(main())
