"""`bitproof shrink` from the command to the file that fails by itself, on real ranks."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.case import Batch, Case, Model, Parallelism, Pipeline
from bitproof.harness.case.case_file import case_text, read_case
from bitproof.harness.cli import main
from bitproof.harness.powers.shrink.shrink_case import Trial
from bitproof.harness.powers.shrink.shrink_command import _Shrinking, refuse, run_own_systems, why_no_file
from bitproof.harness.records import CaseResult, Verdict
from bitproof.harness.report import json as report_json
from tests.harness.execute.test_launch import toy
from tests.hosts import one_host

PASS = "cases/examples/extra_passes.py:add_gradients_in_bfloat16"
SMALL = replace(
    transformer_batch,
    steps=1,
    parallelism=Parallelism(world_size=2, ep=1),
    batch=Batch(sequences=2, seq_len=1),
    model=Model(layers=2, dense_layers=2, dim=8, heads=1),
)


class Shrunk(NamedTuple):
    """A run of the command: its status, what it printed, and its folder."""

    status: int
    lines: list[str]
    folder: Path


def shrink(case: Case, folder: Path, capsys: Any, *options: str) -> Shrunk:
    file = folder / "start.json"
    file.write_text(case_text(case))
    status = main(["shrink", str(file), "--report-dir", str(folder), "--device", "cpu", *options])
    lines = capsys.readouterr().out.splitlines()
    [run_dir] = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return Shrunk(status, lines, run_dir)


@pytest.fixture(scope="module")
def capture(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`capsys` for a fixture of a module."""
    import contextlib
    import io
    from types import SimpleNamespace

    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        yield SimpleNamespace(readouterr=lambda: SimpleNamespace(out=stream.getvalue()))


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory, capture: Any) -> Shrunk:
    return shrink(SMALL, tmp_path_factory.mktemp("shrink"), capture, "--extra-pass", PASS)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_pass_that_breaks_gradients_is_shrunk_to_one_layer_and_two_ranks(shrunk: Shrunk) -> None:
    assert shrunk.status == 1
    case = read_case(shrunk.folder / "shrunk" / "case.json")
    assert (case.model.layers, case.parallelism.world_size) == (1, 2)
    assert reported_tries(shrunk.lines) == [
        "try 1: layers 2 -> 1, dense_layers 2 -> 1: fails the same way",
        "try 2: extra passes 1 -> 0: EQUAL",
    ]
    assert "  layers        2 -> 1" in shrunk.lines
    case_file = shrunk.folder / "shrunk" / "case.json"
    assert f"replay: bitproof run --device cpu --extra-pass {PASS} --case {case_file}" in shrunk.lines


OWN_TRAINER = """
import bitproof, torch
from torch import nn
from beside import OTHER

def plain(case, mesh, activation="none"):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(activation))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(index):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watched = bitproof.watch(step, model=model, optimizer=optimizer, independent_ranks=True)
    return watched

def other(case, mesh):
    return plain(case, mesh, OTHER)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_of_two_systems_of_a_users_a_file_is_written_that_fails_without_the_folder_they_were_in(
    tmp_path: Path, capsys: Any
) -> None:
    mine = make(tmp_path / "trainer") / "mine.py"
    mine.write_text(OWN_TRAINER)
    mine.with_name("beside.py").write_text('OTHER = "tanh"\n')
    systems = {"reference": f"{mine}:plain", "candidate": f"{mine}:other"}
    start = replace(SMALL, name="mine", family="mine", steps=2, pipeline=Pipeline(), **systems)
    done = shrink(start, make(tmp_path / "runs"), capsys, "--tries", "2")
    file = done.folder / "shrunk" / "mine.py"
    assert done.status == 1 and any(f"{file}, " in line and "it exits with 1" in line for line in done.lines), done
    shutil.rmtree(mine.parent)
    text = file.read_text()
    imports = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any("bitproof" in ast.unparse(node) for node in imports), "it needs torch alone"
    assert "gelu of 1 (forward)" in text and f"It needs torch {torch.__version__}." in text
    again = subprocess.run([sys.executable, file], cwd=make(tmp_path / "elsewhere"), capture_output=True, text=True)
    assert again.returncode == 1 and "rank 0, step 0: grad 0.weight: " in again.stdout, again


@pytest.mark.ranks
def test_a_file_that_shows_no_difference_is_not_handed_out(tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong.py", tmp_path / "right.py"
    assert run_own_systems(wrong, "print('it differs')\nraise SystemExit(1)\n") == (
        wrong,
        f"{wrong}, 2 lines; it exits with 1 and says\n          it differs",
    )
    assert run_own_systems(right, "print('none')\n")[0] is None and not right.exists()


def reported_tries(lines: list[str]) -> list[str]:
    """What a search tells of each try, its times left out."""
    return [line.split("] ")[1].rsplit(" (", 1)[0] for line in lines if "] try " in line]


@pytest.mark.ranks
def test_a_rank_that_raises_is_shrunk_too_and_gets_no_file(tmp_path: Path, capsys: Any) -> None:
    start = replace(toy("raising", world_size=3), steps=3)
    with one_host():
        found = shrink(start, tmp_path, capsys, "--tries", "3", "-j", "2")
    assert found.status == 3 and len(reported_tries(found.lines)) == 3
    assert read_case(found.folder / "shrunk" / "case.json").parallelism.world_size == 2
    assert "file:   none: what fails is a run, and a file could only compare results" in found.lines
    assert any(line.startswith("the budget is spent (3 tries, ") for line in found.lines)


@pytest.mark.parametrize(
    ("verdicts", "steps"),
    [
        ([Verdict.DIFFERENT], 1),
        ([Verdict.EQUAL, Verdict.DIFFERENT], 20),  # in a later step
        ([Verdict.ERROR, Verdict.DIFFERENT], 20),  # one step may be too few for a system of the user's
        ([Verdict.NONDETERMINISTIC, Verdict.NONDETERMINISTIC], 20),
    ],
)
def test_only_a_case_whose_first_step_differs_is_not_run_to_its_end(verdicts: list[Verdict], steps: int) -> None:
    shrinking, left = object.__new__(_Shrinking), iter(verdicts)

    def watched(trial: Trial, control: str, name: str, *, logs_calls: bool = False) -> CaseResult:
        ran.append(trial.case.steps)
        logged.append(logs_calls)
        facts: dict[str, Any] = {"steps": trial.case.steps, "world_size": 2, "device": "cpu", "backend": "gloo"}
        return CaseResult(case=trial.case, verdict=next(left), **facts)

    ran: list[int] = []
    logged: list[bool] = []
    shrinking._watched = watched  # type: ignore[method-assign, assignment]
    start = Trial(replace(SMALL, steps=20))
    failing, first = shrinking._first(start)
    assert (failing.case.steps, first.verdict) == (steps, verdicts[-1])
    assert ran == [1, 20][: len(verdicts)]
    assert logged == [True, False][: len(verdicts)]
    assert shrinking.logs_calls == (steps == 1), "tries of one step are logged where that shows the difference"
    ran.clear()
    left = iter(verdicts)
    shrinking._first(replace(start, inject="sleep:rank=0,step=3"))
    assert ran == [20], "a fault of a later step is no fault of one step"


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.ranks
def test_the_file_fails_by_itself_and_not_without_the_defect(shrunk: Shrunk, tmp_path: Path) -> None:
    file = shrunk.folder / "shrunk" / "transformer_batch.py"
    assert run_plainly(file, tmp_path)[0] == 1, shrunk.lines
    text = file.read_text()
    assert "harness" not in text.split('"""')[2] and "bitproof.reference.parallel" not in text
    mended = tmp_path / "mended.py"
    mended.write_text(text.replace("dtype=torch.bfloat16", "dtype=torch.float32"))
    assert run_plainly(mended, tmp_path) == (0, "reference and candidate agree in every bit\n")
    assert any(line.startswith(f"file:   {file}, {len(text.splitlines())} lines") for line in shrunk.lines)


def run_plainly(file: Path, folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-I", str(file)], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_the_report_has_the_small_case_confirmed_by_controls(shrunk: Shrunk) -> None:
    report = report_json.read(shrunk.folder / report_json.FILE_NAME)
    [result] = report.cases
    assert (result.verdict, result.case.model.layers, report.exit_status) == ("DIFFERENT", 1, 1)
    assert result.control == {"reference": "EQUAL", "candidate": "EQUAL"}
    assert not (shrunk.folder / "try1").exists(), "tries leave nothing"


@pytest.mark.parametrize(
    ("verdict", "status", "text"),
    [
        (Verdict.EQUAL, 0, "nothing to shrink: EQUAL, the case does not fail\n"),
        (Verdict.CLOSE, 0, "nothing to shrink: CLOSE, the case does not fail\n"),
        (Verdict.UNVERIFIED, 3, "nothing to shrink: UNVERIFIED, the case could not be judged\n"),
        (
            Verdict.NONDETERMINISTIC,
            1,
            "nothing to shrink: NONDETERMINISTIC, a system differs from itself, so smaller cases would prove nothing\n",
        ),
    ],
)
def test_what_is_no_failure_is_reported_so(verdict: Verdict, status: int, text: str, capsys: Any) -> None:
    facts = {"steps": 1, "world_size": 2, "device": "cpu", "backend": "gloo"}
    assert refuse(CaseResult(case=SMALL, verdict=verdict, error="why", **facts)) == status
    assert capsys.readouterr() == (text, "why\n")


@pytest.mark.parametrize(
    ("change", "device", "why"),
    [
        ({}, "cpu", None),
        ({}, "cuda", "it fails on cuda, and a file runs on the CPU, by other operators"),
        ({"pipeline": Pipeline(backend="inductor")}, "cpu", "what inductor compiles is not the graph's own code"),
    ],
)
def test_a_file_is_written_only_of_what_it_can_show(change: Any, device: str, why: str | None) -> None:
    case = replace(SMALL, **change)
    result = CaseResult(case=case, verdict=Verdict.DIFFERENT, steps=1, world_size=2, device=device, backend="gloo")
    assert why_no_file(Trial(case, (), None), result) == why


@pytest.mark.ranks
def test_a_wrong_call_is_refused_before_anything_runs(tmp_path: Path, capsys: Any) -> None:
    arguments = ["shrink", "moe_seq", "--report-dir", str(tmp_path / "reports")]
    assert main([*arguments, "--inject", "flip-bit:grad=w,rank=9,step=0"]) == 2
    assert "never fires in case moe_seq" in capsys.readouterr().err
    assert main(["shrink", "no_such_case"]) == 2
    assert "no such case" in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()
