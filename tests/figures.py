"""Figures and their goals: a benchmark prints one figure, `benchmarks/goals.toml` says what it must reach.

`figure("bench.watch", 0.021)` prints the line that `tests.nightly` reads, and returns 1 if the goal is missed:

    FIGURE bench.watch 0.021 share longer, at most 0.03: held

    python -m tests.figures NAME FILE... -- COMMAND...

runs a command that leaves reports, and prints its figure from these: of a junit.xml (pytest and `bitproof run` write
one) the tests or cases that passed, of a report.json of `bitproof faults` the faults that were killed. Files that the
command did not write do not count.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

GOALS = Path(__file__).parent / "benchmarks" / "goals.toml"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What one target must reach.

    `minutes` is what it takes on two quiet cores; `timed` is "measured" or "estimate". `commit` and `machine` are those
    on which the goal was set. `every` is "night" or "week".
    """

    name: str
    run: tuple[str, ...]
    shows: str
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    minutes: float
    timed: str
    every: str
    commit: str
    machine: str

    def __post_init__(self) -> None:
        bound = self.at_least if self.at_most is None else self.at_most
        is_good = {
            "exactly one finite number as `at_most` or `at_least`": bound is not None
            and math.isfinite(bound)
            and None in (self.at_most, self.at_least),
            "a command as `run`": len(self.run) > 0,
            "positive `minutes`": 0 < self.minutes < math.inf,
            "`timed` as measured or estimate": self.timed in ("measured", "estimate"),
            "`every` as night or week": self.every in ("night", "week"),
            "`shows` and `unit`": bool(self.shows and self.unit),
        }
        if missing := [text for text, is_there in is_good.items() if not is_there]:
            raise ValueError(f"{self.name} in {GOALS.name} needs {', '.join(missing)}")

    def is_held(self, value: float) -> bool:
        """Whether a figure reaches the goal. NaN and infinity never do: they are no measurement."""
        if not math.isfinite(value):
            return False
        return value <= self.at_most if self.at_most is not None else value >= (self.at_least or 0.0)

    def __str__(self) -> str:
        """For example "at most 0.03"."""
        return f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"


def read_goals(path: Path = GOALS) -> dict[str, Goal]:
    """All goals by name, in the order of the file. An unknown or missing field is an error."""
    content = tomllib.loads(path.read_text())
    common = {"commit": content["commit"], "machine": content["machine"], "timed": "estimate", "every": "night"}
    goals = {}
    for name, fields in content["targets"].items():
        words = tuple(shlex.split(fields.pop("run", f"make {name}")))
        goals[name] = Goal(**common | fields, name=name, run=words)
    return goals


def figure(name: str, value: float) -> int:
    """Print a target's figure; 1 if it misses its goal."""
    goal = read_goals()[name]
    is_held = goal.is_held(value)
    # A flush, since a process that dies at its end would lose the line.
    print(f"FIGURE {name} {value:.6g} {goal.unit}, {goal}: {'held' if is_held else 'MISSED'}", flush=True)
    return int(not is_held)


def printed_figures(lines: Iterable[str], name: str) -> list[float]:
    """The figures of this name in a target's output."""
    found = []
    for words in map(str.split, lines):
        if words[:2] == ["FIGURE", name] and len(words) > 2:
            try:
                found.append(float(words[2]))
            except ValueError:
                found.append(math.nan)
    return found


def num_passed(path: Path) -> int:
    """How many tests or cases of a junit.xml passed, or how many faults of a report.json were killed."""
    if path.suffix == ".json":
        return int(json.loads(path.read_text())["faults"]["killed"])
    cases = ElementTree.parse(path).getroot().iter("testcase")
    return sum(not any(each.find(tag) is not None for tag in ("failure", "error", "skipped")) for each in cases)


def written_at(path: Path) -> tuple[int, int] | None:
    """Which file is at a path and when it was written; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def main(words: list[str]) -> int:
    """Run the command, print its figure; the command's status, or 1 if the figure misses its goal."""
    if "--" not in words[:-1] or words.index("--") < 2:
        print("usage: python -m tests.figures NAME FILE... -- COMMAND...", file=sys.stderr)
        return 2
    name, *files = words[: words.index("--")]
    before = [written_at(Path(file)) for file in files]
    status = subprocess.run(words[words.index("--") + 1 :], check=False).returncode
    written = [Path(file) for file, old in zip(files, before, strict=True) if written_at(Path(file)) not in (None, old)]
    if len(written) < len(files):
        print(f"{name}: {len(files) - len(written)} of {len(files)} reports were not written: {', '.join(files)}")
        return status or 1
    missed = figure(name, sum(map(num_passed, written)))
    return status or missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
