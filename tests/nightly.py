"""Run what is too long for every submission, one target after another, against the goals of `benchmarks/goals.toml`.

    python -m tests.nightly [night | week | all]     the targets of `make nightly`, of `make weekly`, or both
        --only NAME ...     these targets; `bench` is all whose names begin with `bench.`
        --resume            leave out what held its goal on this commit, in this environment
        --part I/N          one of N parts of about the same time, for N machines
        --list              print the targets, their goals and times, and run nothing
        --folder DIR        where results go, reports/nightly/<list> by default

Each target's output goes to `DIR/logs/<target>.log`. Its figure is the one FIGURE line there (`tests/figures.py`).
`DIR/nightly.json` is written anew after each target, so that an interrupted night can resume; `DIR/nightly.md` is the
table that is printed at the end.

Exit status: 0 every target ended with 0 and held its goal; 1 some did not; 2 wrong call; 130 interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tabulate import tabulate

from tests.figures import GOALS, Goal, printed_figures, read_goals

ROOT = Path(__file__).parents[1]
SECONDS_TO_END = 20.0
"""What an interrupted target gets to clean up before it is killed."""

Identity = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a target came to: its exit status, its figure if it printed one, and what went wrong, if anything did."""

    name: str
    figure: float | None
    status: int
    problem: str | None
    minutes: float
    cpu_minutes: float

    def is_well_formed(self) -> bool:
        """Whether the fields, read from a file, have their types."""
        numbers = (self.minutes, self.cpu_minutes, 0.0 if self.figure is None else self.figure)
        return isinstance(self.status, int) and all(isinstance(number, int | float) for number in numbers)

    def is_held(self, goal: Goal) -> bool:
        """Whether it ended well and reached its goal, judged anew: a file's own word is not taken."""
        return self.status == 0 and self.problem is None and self.figure is not None and goal.is_held(self.figure)

    def outcome(self, goal: Goal) -> str:
        """In a word or a few: "held", "MISSED", or the problem."""
        return self.problem or ("held" if self.is_held(goal) else "MISSED")

    def figure_text(self) -> str:
        """The figure for a reader, or "none"."""
        return "none" if self.figure is None else f"{self.figure:.6g}"


def identity(root: Path) -> Identity:
    """What results belong to: the commit, whether files differ from it, and the environment."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        "commit": git("rev-parse", "HEAD"),
        "is_clean": git("status", "--porcelain") == "",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "machine": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
    }


def read_rows(file: Path, current: Identity) -> tuple[dict[str, Row], str | None]:
    """The rows of an earlier night that `current` may take over, or none and why."""
    if not file.exists():
        return {}, None
    try:
        content = json.loads(file.read_text())
        rows = {fields["name"]: Row(**fields) for fields in content["targets"]}
        if not all(row.is_well_formed() for row in rows.values()):
            raise TypeError("a row is not of the right types")
        earlier = dict(content["identity"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return {}, f"{file} cannot be read ({error})"
    if not current["is_clean"] or current["commit"] is None:
        return {}, "the working tree is not clean, so results belong to no commit"
    changed = [
        f"{key} was {earlier.get(key)}, is {value}" for key, value in current.items() if earlier.get(key) != value
    ]
    return ({}, "; ".join(changed)) if changed else (rows, None)


def part_of(goals: list[Goal], index: int, count: int) -> list[Goal]:
    """The `index`-th of `count` parts (from 1): the longest first, each to the part with the least time so far."""
    minutes, owner = [0.0] * count, dict[str, int]()
    for goal in sorted(goals, key=lambda goal: -goal.minutes):
        owner[goal.name] = least = minutes.index(min(minutes))
        minutes[least] += goal.minutes
    return [goal for goal in goals if owner[goal.name] == index - 1]


def chosen(goals: dict[str, Goal], every: str, words: list[str]) -> list[Goal]:
    """The targets of a list, or those of it that `--only` names."""
    listed = [goal for goal in goals.values() if every in ("all", goal.every)]
    for word in words:
        if not any(_names(word, goal) for goal in listed):
            names = ", ".join(goal.name for goal in listed)
            raise ValueError(f"--only {word} is no target of `{every}`; there are {names}")
    return [goal for goal in listed if not words or any(_names(word, goal) for word in words)]


def _names(word: str, goal: Goal) -> bool:
    return goal.name == word or goal.name.startswith(f"{word}.")


@dataclass
class Night:
    """One run over targets. `rows` are those so far, by name."""

    folder: Path
    started_as: Identity
    rows: dict[str, Row]
    lock: int

    def take(self, goal: Goal) -> Row:
        """Run a target to its end, its limit, or an interruption, and keep its row."""
        log = self.folder / "logs" / f"{goal.name}.log"
        self.rows.pop(goal.name, None)
        self.save()
        began, cpu, status, problem = time.monotonic(), _cpu_seconds(), 1, None
        try:
            with log.open("w") as output:
                output.write(f"$ {' '.join(goal.run)}\n")
                output.flush()
                status, problem = self.run(goal, output.fileno())
        except KeyboardInterrupt:
            problem = "interrupted"
            raise
        finally:
            with log.open(errors="replace") as lines:
                figures = printed_figures(lines, goal.name)
            is_missed = len(figures) == 1 and not goal.is_held(figures[0])
            if problem is None and status and not is_missed:
                problem = f"exit status {status}"
            if problem is None and len(figures) != 1:
                problem = f"{len(figures) or 'no'} FIGURE lines, expected 1"
            if problem is None and identity(ROOT) != self.started_as:
                problem = "files, the commit or the environment changed meanwhile"
            self.rows[goal.name] = Row(
                name=goal.name,
                figure=figures[0] if len(figures) == 1 else None,
                status=status,
                problem=problem,
                minutes=(time.monotonic() - began) / 60,
                cpu_minutes=(_cpu_seconds() - cpu) / 60,
            )
            self.save()
        return self.rows[goal.name]

    def run(self, goal: Goal, output: int) -> tuple[int, str | None]:
        """The exit status of the target's command, and why it was ended, if it was."""
        words = [sys.executable, *goal.run[1:]] if goal.run[0] == "python" else list(goal.run)
        limit = limit_of(goal)
        # A session of its own: an interruption at the terminal reaches us alone, and the whole target ends at once.
        # It inherits the lock, so that no second night begins while one of its processes is left.
        try:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=(self.lock,),
            )
        except OSError as error:
            return 127, f"cannot start: {error}"
        try:
            return process.wait(limit * 60), None
        except subprocess.TimeoutExpired:
            return 1, f"over its limit of {limit:.0f} minutes"
        finally:
            end_session(process)

    def save(self) -> None:
        """Write all rows. The file appears whole or not at all."""
        content = {"identity": self.started_as, "targets": [asdict(row) for row in self.rows.values()]}
        part = self.folder / "nightly.json.part"
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(self.folder / "nightly.json")


def limit_of(goal: Goal) -> float:
    """After how many minutes a target is ended: what hangs must not take the night."""
    return 3 * goal.minutes + 10


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Ask what is left of a target to end, and kill it if it does not; a second interruption kills at once."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(SECONDS_TO_END)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def table(goals: list[Goal], rows: dict[str, Row]) -> str:
    """A line a target."""
    lines = []
    for goal in goals:
        row = rows.get(goal.name)
        figure, outcome = ("", "not run") if row is None else (row.figure_text(), row.outcome(goal))
        times = ("", "") if row is None else (f"{row.minutes:.1f}", f"{row.cpu_minutes:.1f}")
        lines.append((goal.name, goal.shows, figure, goal.unit, str(goal), outcome, *times))
    headers = ("target", "what it shows", "figure", "unit", "goal", "", "minutes", "of CPU")
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def listing(goals: list[Goal]) -> str:
    """A line a target, before it is run."""
    lines = [(g.name, g.shows, g.unit, str(g), f"{g.minutes:g}", g.timed, g.every, " ".join(g.run)) for g in goals]
    headers = ("target", "what it shows", "unit", "goal", "minutes", "", "every", "command")
    total = f"{len(goals)} targets, {sum(goal.minutes for goal in goals):.0f} minutes on two quiet cores"
    return f"{tabulate(lines, headers=headers, tablefmt='github', disable_numparse=True)}\n\n{total}"


@contextmanager
def alone_in(folder: Path) -> Iterator[int]:
    """Hold the folder's lock; BlockingIOError if another night, or what one left behind, has it."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    finally:
        os.close(lock)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Run the chosen targets, print their table, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("every", nargs="?", default="night", choices=("night", "week", "all"))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--part", default="1/1", metavar="I/N")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--goals", type=Path, default=GOALS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        index, count = map(int, options.part.split("/"))
        if not 1 <= index <= count:
            raise ValueError(f"--part {options.part} is no part; expected one such as 1/2")
        goals = part_of(chosen(read_goals(options.goals), options.every, options.only), index, count)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print(listing(goals))
        return 0
    folder = (options.folder or ROOT / "reports" / "nightly" / options.every).resolve()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with alone_in(folder) as lock:
            return run_all(goals, folder, lock, options.resume)
    except BlockingIOError:
        print(f"{folder} is in use: another night runs there, or a process of one is left", file=sys.stderr)
        return 2


def run_all(goals: list[Goal], folder: Path, lock: int, resume: bool) -> int:
    """Run what is not green yet; the exit status."""
    current = identity(ROOT)
    earlier, why = read_rows(folder / "nightly.json", current)
    if resume and why:
        print(f"starts over: {why}")
    anew = {goal.name for goal in goals if not resume or goal.name not in earlier}
    night = Night(folder, current, {name: row for name, row in earlier.items() if name not in anew}, lock)
    status = 0
    try:
        for number, goal in enumerate(goals, 1):
            row = night.rows.get(goal.name)
            is_kept = row is not None and row.is_held(goal)
            if not is_kept:
                print(f"[{number}/{len(goals)}] {goal.name}: {goal.shows} ({goal.minutes:g} minutes)", flush=True)
                row = night.take(goal)
            assert row is not None
            kept = ", from before" if is_kept else ""
            text = f"{row.figure_text()} {goal.unit}, {goal}: {row.outcome(goal)}"
            print(f"    {goal.name}: {text} ({row.minutes:.1f} minutes{kept})", flush=True)
            if not row.is_held(goal):
                print_end(folder / "logs" / f"{goal.name}.log")
            if identity(ROOT) != current:
                print("stops here: files, the commit or the environment changed, so no result would be of one commit")
                break
    except KeyboardInterrupt:
        print("\ninterrupted; `--resume` goes on from here")
        status = 130
    text = table(goals, night.rows)
    (folder / "nightly.md").write_text(f"{text}\n")
    num_held = sum(goal.name in night.rows and night.rows[goal.name].is_held(goal) for goal in goals)
    print(f"\n{text}\n\n{num_held} of {len(goals)} targets held their goals: {folder / 'nightly.json'}")
    return status or int(num_held < len(goals))


def print_end(log: Path) -> None:
    """Print the last lines of a log, and where it is."""
    lines = log.read_text(errors="replace").splitlines()[-10:]
    print(*(f"    | {line[:200]}" for line in lines), f"    see {log}", sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
