"""The composite action, run from its own file: every shell step for real, and only what `bitproof` does made up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bitproof.harness.cli import main
from tests.test_nightly import commands
from tests.workflow import SHELL, Runner, read_workflow

ROOT = Path(__file__).parents[1]
ACTION = read_workflow(ROOT / "action.yml")
STEPS = ACTION["runs"]["steps"]
INPUTS = {name: about["default"] for name, about in ACTION["inputs"].items()}

# `run` writes a report of the verdict that is asked for, and keeps the words of its call; `report` is bitproof's own.
PROGRAM = f"""#!{sys.executable}
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
with Path(os.environ["CALLS"]).open("a") as calls:
    print(*sys.argv[1:], sep="|", file=calls)
if sys.argv[1] == "doctor":
    sys.exit(int(os.environ.get("DOCTOR", "0")))
if sys.argv[1] == "run":
    from bitproof.harness.report.write import write_run
    from bitproof.harness.records import Report
    from tests.harness.reports import ENVIRONMENT, case, result
    verdict = os.environ["VERDICT"]
    if verdict.isdecimal():
        sys.exit(int(verdict))
    folder = Path(sys.argv[sys.argv.index("--report-dir") + 1]) / "20260102T030405Z-abcdef"
    folder.mkdir(parents=True)
    status = {{"EQUAL": 0, "DIFFERENT": 1}}[verdict]
    cases = [result(case(), verdict)]
    write_run(Report(run_id=folder.name, exit_status=status, environment=ENVIRONMENT, cases=cases), folder)
    sys.exit(status)
from bitproof.harness.cli import main
sys.exit(main())
"""


@pytest.fixture
def act(tmp_path):
    """A function that runs the action with some inputs: the exit status, and the runner."""
    for name, text in {
        "bitproof": PROGRAM,
        "python": '#!/bin/sh\nprintf \'%s|\' pip "$@" >> "$CALLS"; echo >> "$CALLS"\n',
    }.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)

    def run(verdict: str, inputs: dict[str, str] | None = None, **env: str) -> tuple[int, Runner]:
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        given = {
            "PATH": path,
            "VERDICT": verdict,
            "CALLS": str(tmp_path / "calls"),
            "GITHUB_ACTION_PATH": "action",
        } | env
        runner = Runner({"env": {}}, tmp_path, given)
        context = {f"inputs.{name}": value for name, value in (INPUTS | (inputs or {})).items()}
        return runner.run_job({"steps": STEPS}, context), runner

    return run


def calls_of(runner: Runner) -> list[list[str]]:
    return [line.split("|") for line in (runner.folder / "calls").read_text().splitlines()]


@pytest.mark.ranks
def test_a_good_run_is_shown_and_uploaded_and_ends_well(act):
    status, runner = act("EQUAL", {"expression": "moe and not seq", "device": "cpu"})
    assert (status, set(runner.results.values())) == (0, {"success"}), runner.output
    assert "Set up Python" not in runner.results, "a job's own Python is left as it is"
    install, doctor, run = calls_of(runner)[:3]
    assert install == ["pip", "-m", "pip", "install", "action", ""]
    assert doctor == ["doctor", "--device", "cpu"]
    assert run[:3] == ["run", "--device", "cpu"] and run[-2:] == ["-k", "moe and not seq"]
    assert "Verdicts: 1 EQUAL." in (runner.folder / "summary.md").read_text()
    assert "::error" not in runner.output
    uploaded = {path.name for path in (runner.folder / "artifacts" / "bitproof").iterdir()}
    assert {"report.json", "report.html", "report.sarif", "junit.xml", "comment.md"} <= uploaded


@pytest.mark.ranks
def test_a_bad_run_is_annotated_and_ends_as_it_did_and_each_input_reaches_the_call_as_one_word(act):
    evil = "$(touch evil); `touch evil` \"'"
    inputs = {
        "cases": "a b.json\n\nc.json\n",
        "candidate": evil,
        "baseline": "base lines",
        "torch": "2.13.0",
        "python": "3.13",
    }
    status, runner = act("DIFFERENT", inputs)
    assert status == 1, runner.output
    assert [name for name, ended in runner.results.items() if ended != "success"] == ["End as the run did"]
    assert "::error title=bitproof near::near: DIFFERENT (grad), expected EQUAL" in runner.output
    comment = (runner.folder / "artifacts" / "bitproof" / "comment.md").read_text()
    assert comment.startswith("### bitproof: 1 of 1 cases not as expected")
    install, _, run = calls_of(runner)[:3]
    assert install == ["pip", "-m", "pip", "install", "torch==2.13.0", "action", ""]
    assert run[5:] == [
        *("--case", "a b.json", "--case", "c.json", "--candidate", evil),
        *("--baseline", "--baseline-dir", "base lines", "--require-baseline"),
    ]
    assert runner.results["Set up Python"] == "success" and not list(runner.folder.rglob("evil"))


@pytest.mark.ranks
@pytest.mark.parametrize(("verdict", "env", "status"), [("2", {}, 2), ("137", {}, 137), ("EQUAL", {"DOCTOR": "3"}, 3)])
def test_a_run_that_leaves_nothing_fails_as_it_did(act, verdict, env, status):
    found, runner = act(verdict, **env)
    assert found == status, runner.output
    assert not (runner.folder / "summary.md").exists() and not (runner.folder / "artifacts").exists()


def test_every_call_of_bitproof_is_one_that_bitproof_takes():
    found = [line for step in STEPS for line in commands(step.get("run", ""))]
    assert [line[0] for line in found] == ["doctor", "run", "report", "report"]
    for line in found:
        words = [word for word in line if word != "${words[@]}"]
        assert main([*words, "--help"]) == 0
    for option in ("-k", "--case", "--candidate", "--baseline", "--baseline-dir", "--require-baseline"):
        assert main(["run", option, "--help"] if option.endswith("baseline") else ["run", option, "x", "--help"]) == 0


@pytest.mark.ranks
def test_what_people_type_reaches_a_shell_as_a_variable_only_and_scripts_are_scripts():
    scripts = [step["run"] for step in STEPS if "run" in step]
    assert len(scripts) == 5 and all("${{" not in script for script in scripts)
    assert all(step["shell"] == "bash" for step in STEPS if "run" in step)
    assert all(re.fullmatch(r"actions/[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in STEPS if "uses" in step)
    for script in scripts:
        subprocess.run([*SHELL, "-n", "-c", script], check=True)
    outputs = [about["value"] for about in ACTION["outputs"].values()]
    ids = {step["id"] for step in STEPS if "id" in step}
    assert {re.fullmatch(r"\$\{\{ steps\.(\w+)\.outputs\.\w+ \}\}", value)[1] for value in outputs} <= ids
