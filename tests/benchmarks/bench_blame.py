"""Whom blame names in trainers with one defect each, through the command line: a table.

The trainers are those of `defective_trainers`, `handwritten_trainers` and `parallel_trainers`; with `--abroad` those of
frameworks, in `tests/abroad/defects.py`, which must be installed.

`python -m tests.benchmarks.bench_blame [WORD...]` runs those whose kind and name hold one of the words. Exits with 1
unless all are DIFFERENT and found on the rank, and but one of 30 (of 20 abroad) in module and direction, but two in the
operator; or if a cause is verified by exchange and wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bitproof.harness.user_code.user_file import run_file
from tests.benchmarks import defective_trainers, handwritten_trainers, parallel_trainers
from tests.benchmarks.defective_trainers import Defect

TRAINERS = defective_trainers, handwritten_trainers, parallel_trainers
ABROAD = Path(__file__).parents[1] / "abroad" / "defects.py"


def case_of(folder: Path, trainers: ModuleType, kind: str, defect: str) -> Path:
    """The case file of one defect of a file of trainers."""
    case = folder / f"{kind}_{defect}.json"
    described = {
        "name": case.stem,
        "preload": getattr(trainers, "PRELOAD", ()),
        "family": "blame",
        "steps": trainers.STEPS,
        "parallelism": {"world_size": 2, "ep": 1},
    }
    described |= {"reference": f"{trainers.__file__}:{kind}", "candidate": f"{trainers.__file__}:{kind}__{defect}"}
    case.write_text(json.dumps(described))
    return case


def ran(folder: Path, cases: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What one command, whose process imports a framework once, reports of all of these cases, by name."""
    command = [sys.executable, "-m", "bitproof", "run", "--no-control", "--timeout", "500"]
    command += [word for case in cases for word in ("--case", str(case))]
    done = subprocess.run([*command, "--report-dir", str(folder / "reports")], stdout=sys.stderr)
    reports = sorted((folder / "reports").glob("*/report.json"))
    if not reports:
        raise SystemExit(f"no report, status {done.returncode}")
    return {result["name"]: result for result in json.loads(reports[-1].read_text())["cases"]}


def judged(found: dict[str, Any], defect: Defect) -> tuple[bool, bool, bool]:
    """Whether module and direction, operator and rank are those of the defect."""
    place = (found.get("module") or "", found.get("direction")) == (defect.module or "", defect.direction)
    operator = str(found.get("operator")).startswith(defect.operators)
    return place, operator, found.get("operator") is not None and defect.rank in (None, found.get("operator_rank"))


def main(*words: str) -> int:
    """Run all, and tell."""
    totals, num, shown = [0, 0, 0, 0], 0, Counter[str]()
    wanted = [word for word in words if not word.startswith("-")] or [""]
    trainers = (run_file(ABROAD)[0],) if "--abroad" in words else TRAINERS
    chosen = [
        (of, kind, name, defect)
        for of in trainers
        for (kind, name), defect in of.DEFECTS.items()
        if any(word in f"{kind} {name}" for word in wanted)
    ]
    if not chosen:
        raise SystemExit(f"no defect has one of the words {wanted}; they are such as 'fsdp2 decay'")
    with tempfile.TemporaryDirectory() as folder:
        results = ran(Path(folder), [case_of(Path(folder), of, kind, name) for of, kind, name, _ in chosen])
    for _, kind, name, defect in chosen:
        result = results[f"{kind}_{name}"]
        found = result["first_divergence"] or {}
        right = (result["verdict"] == "DIFFERENT", *judged(found, defect))
        num, totals = num + 1, [total + each for total, each in zip(totals, right, strict=True)]
        told = {key: found.get(key) for key in ("operator", "module", "direction", "operator_rank", "how")}
        marks = " ".join("yes" if each else "NO " for each in right[1:])
        exchanged = found.get("verification") or {"status": "not tried"}
        is_right = all(right)
        shown[f"{exchanged['status']}{'' if is_right else ', but wrong'}"] += 1
        print(f"{kind:12} {name:24} {result['verdict']:10} {marks} {told}", flush=True)
        print(
            "   ", *(f"{name}: {exchanged.get(name)};" for name in ("status", "reason", "runs", "causes")), flush=True
        )
    print(f"verdict {totals[0]}, module and direction {totals[1]}, operator {totals[2]}, rank {totals[3]} of {num}")
    print("; ".join(f"{status}: {count}" for status, count in sorted(shown.items())))
    missed, of = [num - total for total in totals], 20 if "--abroad" in words else 30
    is_bad = bool(shown["verified, but wrong"])
    return int(is_bad or any(more > most for more, most in zip(missed, (0, num // of, 2 * num // of, 0), strict=True)))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
