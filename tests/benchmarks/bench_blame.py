"""Whom blame names in trainers with one defect each, through the command line: a table.

The trainers are those of `defective_trainers`, `handwritten_trainers`, `parallel_trainers` and `varied_trainers`; with
`--abroad` those of frameworks, in `tests/abroad/defects.py`, which must be installed.

`python -m tests.benchmarks.bench_blame [--verify] [--results FILE] [WORD...]` runs those whose kind and name hold one
of the words.
Exits with 1 unless all are DIFFERENT and found on the rank, and but one of 30 (of 20 abroad) in module and direction,
but two in the operator.

With `--verify`, causes are verified by exchange, and programs with two and three independent defects run as well. A
cause that is verified must be right: in module, direction, operator and rank, and with several defects in each of
them, no more and no fewer causes. Exits with 1 as well if one is verified but wrong.

With `--results FILE`, each result is appended to that file, and programs with a result there do not run again: the
benchmark takes an hour, and may be interrupted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from bitproof.harness.user_code.user_file import run_file
from tests.benchmarks import defective_trainers, handwritten_trainers, parallel_trainers, varied_trainers
from tests.benchmarks.defective_trainers import Defect
from tests.figures import figure

TRAINERS = defective_trainers, handwritten_trainers, parallel_trainers, varied_trainers
ABROAD = Path(__file__).parents[1] / "abroad" / "defects.py"
AT_ONCE = 8
"""Programs of one command: its process imports a framework once for all of them."""

SEVERAL = """
    fsdp2 tanh_gelu other_eps; fsdp2 other_eps decay; fsdp2 alpha beta; fsdp2 scaled_on_rank_1 decay
    ddp tanh_gelu beta; ddp scaled_in_place scaled_gradient; ddp tanh_gelu more_loss_on_rank_1
    tp tanh_gelu other_eps; tp scaled_on_rank_1 other_eps; tp alpha eps
    pipelined tanh_gelu other_eps; pipelined other_eps sends_back_more
    accumulating tanh_gelu_in_the_second not_divided; clipping other_eps max_norm; loop tanh_gelu beta
    compiled tanh_gelu other_eps; compiled other_eps decay; scaled one_block_in_float32 one_not_unscaled
    owners decay_on_a_norm max_for_sum
    fsdp2 tanh_gelu other_eps decay; ddp tanh_gelu scaled_gradient beta; tp tanh_gelu other_eps eps
    clipping other_eps max_norm scaled_late; compiled tanh_gelu other_eps decay
"""
"""Programs with two or three defects, all of them in the first step that differs; none hides another."""


class Program(NamedTuple):
    """A trainer of one kind with one or more defects."""

    trainers: ModuleType
    kind: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name in a case file: `ddp__tanh_gelu__beta`."""
        return "__".join((self.kind, *self.names))

    @property
    def defects(self) -> list[Defect]:
        """The truth."""
        return [self.trainers.DEFECTS[self.kind, name] for name in self.names]


def programs(trainers: Iterable[ModuleType]) -> Iterator[Program]:
    """All programs with one defect, and then those with several."""
    trainers = list(trainers)
    for of in trainers:
        yield from (Program(of, kind, (name,)) for kind, name in of.DEFECTS)
    for kind, *names in (line.split() for line in SEVERAL.replace("\n", ";").split(";") if line.strip()):
        yield from (Program(of, kind, tuple(names)) for of in trainers if (kind, names[0]) in of.DEFECTS)


def case_of(folder: Path, program: Program) -> Path:
    """The case file of one program."""
    case, of = folder / f"{program.name}.json", program.trainers
    described = {
        "name": case.stem,
        "preload": getattr(of, "PRELOAD", ()),
        "family": "blame",
        "steps": of.STEPS,
        "parallelism": {"world_size": 2, "ep": 1},
    }
    described |= {"reference": f"{of.__file__}:{program.kind}", "candidate": f"{of.__file__}:{program.name}"}
    case.write_text(json.dumps(described))
    return case


def ran(folder: Path, cases: Sequence[Path], *options: str) -> dict[str, dict[str, Any]]:
    """What one command, whose process imports a framework once, reports of all of these cases, by name."""
    command = [sys.executable, "-m", "bitproof", "run", "--no-control", "--timeout", "500", *options]
    command += [word for case in cases for word in ("--case", str(case))]
    done = subprocess.run([*command, "--report-dir", str(folder / "reports")], stdout=sys.stderr)
    reports = sorted((folder / "reports").glob("*/report.json"), key=lambda path: path.stat().st_mtime_ns)
    if not reports:
        raise SystemExit(f"no report, status {done.returncode}")
    return {result["name"]: result for result in json.loads(reports[-1].read_text())["cases"]}


def kept(results: Path | None) -> dict[str, dict[str, Any]]:
    """The results of earlier runs, by name; the last of each program counts."""
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def results_of(
    chosen: Sequence[Program], verifies: bool, results: Path | None
) -> Iterator[tuple[Program, dict[str, Any]]]:
    """Each program with its result: those that have one first, the others in groups of `AT_ONCE`."""
    known = kept(results)
    yield from ((program, known[program.name]) for program in chosen if program.name in known)
    due = [program for program in chosen if program.name not in known]
    for begin in range(0, len(due), AT_ONCE):
        some, began = due[begin : begin + AT_ONCE], time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            cases = [case_of(Path(folder), each) for each in some]
            found = ran(Path(folder), cases, "--verify" if verifies else "--no-verify")
        print(f"# {len(some)} programs in {time.monotonic() - began:.0f} s", flush=True)
        if results is not None:
            with results.open("a") as file:
                file.writelines(json.dumps(found[program.name]) + "\n" for program in some)
        yield from ((program, found[program.name]) for program in some)


def judged(found: dict[str, Any], defect: Defect) -> tuple[bool, bool, bool]:
    """Whether module and direction, operator and rank are those of the defect."""
    place = (found.get("module") or "", found.get("direction")) == (defect.module or "", defect.direction)
    operator = str(found.get("operator")).startswith(defect.operators)
    return place, operator, found.get("operator") is not None and defect.rank in (None, found.get("operator_rank"))


def explains(found: dict[str, Any], defects: Sequence[Defect]) -> list[bool]:
    """Whether each defect is one of the causes that are found, and no cause is anything else, the last."""
    further = (found.get("verification") or {})["causes"]
    judgements = [[judged(each, defect) for defect in defects] for each in (found, *map(_flat, further))]
    is_found = [any(all(of[number]) for of in judgements) for number in range(len(defects))]
    return [*is_found, all(any(map(all, of)) for of in judgements)]


def _flat(cause: dict[str, Any]) -> dict[str, Any]:
    return cause | {"operator_rank": cause.get("rank")}


def main(*words: str) -> int:
    """Run all, and tell."""
    totals, num, shown = [0, 0, 0, 0], 0, Counter[str]()
    given = list(words)
    results = Path(given.pop(given.index("--results") + 1)) if "--results" in given else None
    wanted, verifies = [word for word in given if not word.startswith("-")] or [""], "--verify" in given
    known = programs((run_file(ABROAD)[0],) if "--abroad" in words else TRAINERS)
    chosen = [
        each
        for each in known
        if any(word in f"{each.kind} {' '.join(each.names)}" for word in wanted) and (verifies or len(each.names) == 1)
    ]
    if not chosen:
        raise SystemExit(f"no defect has one of the words {wanted}; they are such as 'fsdp2 decay'")
    for program, result in results_of(chosen, verifies, results):
        found = result["first_divergence"] or {}
        status = (found.get("verification") or {"status": "not tried"})["status"]
        if len(program.names) > 1:
            is_right = status != "not tried" and all(explains(found, program.defects))
            shown["several defects"] += 1
            shown["several defects, all found"] += status != "not tried" and all(explains(found, program.defects)[:-1])
            marks = "yes" if is_right else "NO "
        else:
            right = (result["verdict"] == "DIFFERENT", *judged(found, program.defects[0]))
            num, totals = num + 1, [total + each for total, each in zip(totals, right, strict=True)]
            is_right = all(right) and (status != "verified" or all(explains(found, program.defects)))
            marks = " ".join("yes" if each else "NO " for each in right[1:])
        shown["programs"] += 1
        shown["with a cause"] += found.get("operator") is not None
        shown["right"] += is_right
        shown[f"{status}{'' if is_right else ', but wrong'}"] += 1
        print_outcome(program, result, found, marks)
    print(f"verdict {totals[0]}, module and direction {totals[1]}, operator {totals[2]}, rank {totals[3]} of {num}")
    print("; ".join(f"{status}: {count}" for status, count in sorted(shown.items())))
    missed, of = [num - total for total in totals], 20 if "--abroad" in words else 30
    is_bad = bool(shown["verified, but wrong"])
    if wanted == [""]:
        is_bad |= bool(figure("abroad.blame" if "--abroad" in words else "fuzz.blame", totals[1] / num))
    return int(is_bad or any(more > most for more, most in zip(missed, (0, num // of, 2 * num // of, 0), strict=True)))


def print_outcome(program: Program, result: dict[str, Any], found: dict[str, Any], marks: str) -> None:
    """Print one program's row, and what exchanges showed."""
    reported = {key: found.get(key) for key in ("operator", "module", "direction", "operator_rank", "how")}
    print(f"{program.kind:12} {'+'.join(program.names):24} {result['verdict']:10} {marks} {reported}", flush=True)
    if verification := found.get("verification"):
        fields = (f"{name}: {verification.get(name)};" for name in ("status", "reason", "runs", "causes", "calls"))
        print("   ", *fields, (result.get("seconds") or {}).get("replay"), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
