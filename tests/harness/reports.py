"""Results and reports made by hand, for what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.commands.shard import cases_of
from bitproof.harness.records import CaseResult, CaseSeconds, Report, Shard, Verdict
from bitproof.harness.report import json as report_json
from bitproof.harness.report.status import exit_status, worst

COMPARED = {"loss": 4, "grad": 164, "param": 164, "buffer": 32, "optimizer": 492}
"""Of two steps of the smallest DeepSeek-V3 on two ranks."""
ENVIRONMENT = {"torch": "2.13.0", "cpu": "one", "device": "cpu", "backend": "gloo"}


def case(name: str = "near", **facts: Any) -> Case:
    plain = {"reference": "eager", "steps": 2, "parallelism": Parallelism(world_size=2)}
    return Case(name=name, family="toys", **plain | facts)


def result(of: Case, verdict: str = "EQUAL", seconds: float = 1.5, **facts: Any) -> CaseResult:
    differs, noisy = verdict in ("DIFFERENT", "NONDETERMINISTIC"), verdict == "NONDETERMINISTIC"
    facts = {
        "compared": {kind: count * of.steps * of.parallelism.world_size // 4 for kind, count in COMPARED.items()},
        "mismatched": COMPARED | dict.fromkeys(COMPARED, 0) | ({"grad": 1} if differs else {}),
        "differing_kinds": ("grad",) if differs else (),
        "losses": dict.fromkeys(("reference", "candidate"), ["0x1p+0"] * of.steps),
        "seconds": CaseSeconds(total=seconds),
        "control": dict.fromkeys(("reference", "candidate"), "EQUAL") | ({"candidate": "DIFFERENT"} if noisy else {}),
        **facts,
    }
    facts |= {"steps": of.steps, "world_size": of.parallelism.world_size, "device": "cpu", "backend": "gloo"}
    return CaseResult(case=of, verdict=Verdict(verdict), **facts)


def write_report(folder: Path, results: Sequence[CaseResult], **facts: Any) -> Path:
    """A run's folder, named by its run id, with nothing but its report."""
    facts = {"run_id": "20260102T030405Z-abcdef", "environment": dict(ENVIRONMENT), **facts}
    status = exit_status(results, is_shard=facts.get("shard") is not None, faults=facts.get("faults"))
    run_dir = folder / facts["run_id"]
    run_dir.mkdir(parents=True)
    if facts.get("shard") is None:
        facts.setdefault("left_out", tuple(case(name, requires="cuda") for name in facts.get("not_run", ())))
    report = Report(exit_status=worst([status, facts.pop("status", 0)]), cases=list(results), **facts)
    (run_dir / report_json.FILE_NAME).write_text(report_json.render(report))
    return run_dir


def write_shard(folder: Path, index: int, count: int, selection: Sequence[Case], **facts: Any) -> Path:
    """The run folder of one shard. `verdicts` has those other than EQUAL, by name."""
    shard = Shard(index=index, count=count, selection=tuple(selection))
    verdicts, not_run = facts.pop("verdicts", {}), facts.get("not_run", {})
    results = [result(c, verdicts.get(c.name, "EQUAL")) for c in cases_of(shard) if c.name not in not_run]
    return write_report(folder / f"shard{index}", results, shard=shard, **facts)
