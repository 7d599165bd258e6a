"""Whom blame names in trainers with one defect each, through the command line: a table.

The trainers are those of `defective_trainers`, `handwritten_trainers` and `parallel_trainers`; with `--abroad` those of
frameworks, in `tests/abroad/defects.py`, which must be installed.

`python -m tests.benchmarks.bench_blame [WORD]` runs those whose kind and name hold the word. Exits with 1 where fewer
than 29 of 30 are found in module and direction, 28 in the operator, and all on the rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from bitproof.harness.user_code.user_file import run_file
from tests.benchmarks import defective_trainers, handwritten_trainers, parallel_trainers
from tests.benchmarks.defective_trainers import Defect

TRAINERS = defective_trainers, handwritten_trainers, parallel_trainers
ABROAD = Path(__file__).parents[1] / "abroad" / "defects.py"


def blamed_in(folder: Path, trainers: ModuleType, kind: str, defect: str) -> tuple[str, dict[str, Any]]:
    """The verdict on one defect of a file of trainers, and the first divergence."""
    case = folder / f"{kind}_{defect}.json"
    parallelism = {"world_size": 2, "ep": 1}
    preload = getattr(trainers, "PRELOAD", ())
    described = {
        "name": case.stem,
        "preload": preload,
        "family": "blame",
        "steps": trainers.STEPS,
        "parallelism": parallelism,
    }
    described |= {"reference": f"{trainers.__file__}:{kind}", "candidate": f"{trainers.__file__}:{kind}__{defect}"}
    case.write_text(json.dumps(described))
    command = [sys.executable, "-m", "bitproof", "run", "--case", str(case), "--no-control"]
    command += ["--report-dir", str(folder / case.stem), "--timeout", "500"]
    ran = subprocess.run(command, capture_output=True, text=True)
    reports = sorted((folder / case.stem).glob("*/report.json"))
    if not reports:
        return f"no report: {ran.stdout[-300:]}{ran.stderr[-300:]}", {}
    result = json.loads(reports[-1].read_text())["cases"][0]
    return result["verdict"], result["first_divergence"] or {}


def judged(found: dict[str, Any], defect: Defect) -> tuple[bool, bool, bool]:
    """Whether module and direction, operator and rank are those of the defect."""
    place = (found.get("module") or "", found.get("direction")) == (defect.module or "", defect.direction)
    operator = str(found.get("operator")).startswith(defect.operators)
    return place, operator, found.get("operator") is not None and defect.rank in (None, found.get("operator_rank"))


def main(*words: str) -> int:
    """Run all, and tell."""
    totals, num = [0, 0, 0], 0
    word = next((word for word in words if not word.startswith("-")), "")
    trainers = (run_file(ABROAD)[0],) if "--abroad" in words else TRAINERS
    with tempfile.TemporaryDirectory() as folder:
        for of, (kind, name), defect in [(m, *each) for m in trainers for each in m.DEFECTS.items()]:
            if word not in f"{kind} {name}":
                continue
            verdict, found = blamed_in(Path(folder), of, kind, name)
            right = judged(found, defect)
            num, totals = num + 1, [total + each for total, each in zip(totals, right, strict=True)]
            told = {key: found.get(key) for key in ("operator", "module", "direction", "operator_rank", "how")}
            marks = " ".join("yes" if each else "NO " for each in right)
            print(f"{kind:12} {name:24} {verdict:10} {marks} {told}", flush=True)
    print(f"module and direction {totals[0]}, operator {totals[1]}, rank {totals[2]} of {num}")
    return int(totals[0] < num * 29 / 30 or totals[1] < num * 28 / 30 or totals[2] < num)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
