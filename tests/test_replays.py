"""The command that a report prints for a failing case, run for real from another folder."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Batch, Case, Parallelism
from bitproof.harness.case.case_file import case_text
from bitproof.harness.cli import main
from bitproof.harness.records import CaseResult
from bitproof.harness.report import json as report_json
from tests.small import small

pytestmark = pytest.mark.ranks

TRAINER = """
import torch
import torch.distributed as dist


class Trainer:
    def __init__(self, mesh, factor, prefix):
        self.weight, self.rank, self.factor, self.name = torch.ones(3), mesh.rank, factor, prefix + "weight"

    def step(self, index):
        grad = self.weight * (self.rank + 1.0)
        dist.all_reduce(grad)
        grad = grad * self.factor if index == 1 else grad
        self.weight = self.weight - grad / 8
        yield "loss", "loss", grad.sum()
        yield "grad", self.name, grad
        yield "param", self.name, self.weight
        yield "optimizer", self.name, grad


def right(case, mesh):
    return Trainer(mesh, 1.0, "")


def wrong(case, mesh):
    return Trainer(mesh, 1.5, "own.")
"""
PASS = """
import torch


def negate_a_gradient(module):
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        negated = module.graph.call_function(torch.ops.aten.neg.default, (output.args[0][-1],))
    output.args = ([*output.args[0][:-1], negated],)
"""


def cause(result: CaseResult) -> tuple[object, ...]:
    """Where two systems part and the call to blame, without the names of files, which depend on the folder."""
    found = result.first_divergence
    assert found and found.call
    call = found.call
    return (
        found.step,
        found.rank,
        found.kind,
        found.name,
        found.tensor,
        call.operator,
        call.how,
        call.ranks,
        call.output,
    )


def replay_line(printed: str) -> list[str]:
    [line] = [line for line in printed.splitlines() if line.strip().startswith("replay: ")]
    return shlex.split(line.split("replay: ")[1])


FOREIGN = Case(
    name="toy",
    family="toy",
    reference="trainer.py:right",
    candidate="trainer.py:wrong",
    steps=2,
    parallelism=Parallelism(world_size=2, ep=1),
)
TRACED = replace(
    small(CASES["transformer_batch"]),
    steps=1,
    parallelism=Parallelism(world_size=2),
    batch=Batch(sequences=4, seq_len=8),
)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (FOREIGN, "--names names.json --stress"),
        pytest.param(
            TRACED,
            "--extra-pass passes.py:negate_a_gradient@after=clean_up --no-kept-graph",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a trainer and names in files", "a pass in a file"],
)
def test_a_replay_line_run_in_another_folder_gets_the_same_verdict(
    case: Case, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    (home / "case.json").write_text(case_text(case))
    (home / "trainer.py").write_text(TRAINER)
    (home / "passes.py").write_text(PASS)
    (home / "names.json").write_text(json.dumps({"own.*": "*"}))
    monkeypatch.chdir(home)
    asked = ["--case", "case.json", "--device", "cpu", "--control", "never", *options.split()]
    status = main(["run", *asked])
    printed = capsys.readouterr()
    assert status == 1, printed
    replay = replay_line(printed.out)
    monkeypatch.chdir(elsewhere)
    assert replay[:2] == ["bitproof", "run"]
    status = main(replay[1:])
    assert status == 1, capsys.readouterr()
    first, second = (
        report_json.read(folder / "reports" / "latest" / "report.json").cases[0] for folder in (home, elsewhere)
    )
    assert (first.verdict, first.error) == ("DIFFERENT", None)
    for attribute in ("verdict", "mismatched", "compared", "differing", "losses", "remarks", "stress", "steps"):
        assert getattr(first, attribute) == getattr(second, attribute), attribute
    assert cause(first) == cause(second)
