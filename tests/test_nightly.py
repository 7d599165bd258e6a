"""The nightly workflow, run from its own file: every shell step for real, and only cases and installation made up."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bitproof.harness.case import Case
from bitproof.harness.cli import main
from bitproof.harness.records import Score
from bitproof.harness.report import json as report_json
from tests.harness.reports import case, result, write_report, write_shard
from tests.workflow import SHELL, Runner, read_workflow

ROOT = Path(__file__).parents[1]
NIGHTLY = ROOT / ".github" / "workflows" / "nightly.yml"
WORKFLOW = read_workflow(NIGHTLY)
JOBS = WORKFLOW["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]

# What stands in for `bitproof` in the steps: `run` runs nothing, and takes the folder that the fixture `nightly` made
# for it, and its status; `merge` is bitproof's own.
PROGRAM = f"""#!/bin/sh -e
made={{made}}/$RUN_ID
case $1 in
  doctor) exit 0 ;;
  merge) PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m bitproof "$@" ;;
esac
echo "$*" >> "$made/calls"
what=$1
while [ $# -gt 1 ]; do
  case $1 in
    --shard) what=shard${{{{2%/*}}}} ;;
    --report-dir) folder=$2 ;;
  esac
  shift
done
[ ! -d "$made/$what" ] || cp -r "$made/$what" "$folder"
exit "$(cat "$made/$what.status")"
"""
# And for Python: the targets of the night run nothing. The first part has the faults.
PYTHON = """#!/bin/sh -e
made={made}/$RUN_ID
echo "$* $MAKEFLAGS" >> "$made/calls"
case $5 in 1/*) part=1 ;; *) part=2 ;; esac
mkdir "$7"
echo '{{}}' > "$7/nightly.json"
echo "# targets$part" > "$7/nightly.md"
[ $part = 2 ] && exit 0
if [ -d "$made/faults" ]; then
  mkdir -p reports/faults
  cp -r "$made/faults/$RUN_ID" reports/faults/run
  ln -s run reports/faults/latest
fi
exit "$(cat "$made/targets.status")"
"""
CALLS = [
    "run -k a or b --shard 1/2 --device cuda",
    "run -k a or b --shard 2/2 --device cuda",
    "-m tests.nightly night --part 1/2",
    "-m tests.nightly night --part 2/2",
]


def commands(script: str) -> list[list[str]]:
    """Every call of bitproof in a script, as its arguments. A variable stands for itself."""
    lines = [line.strip() for line in script.splitlines() if line.strip().startswith("bitproof ")]
    return [shlex.split(re.split(r" \|\| | > ", line)[0])[1:] for line in lines]


@pytest.mark.ranks
def test_every_shell_step_is_a_script():
    scripts = [step["run"] for step in STEPS if "run" in step]
    assert len(scripts) > 8
    for script in scripts:
        subprocess.run([*SHELL, "-n", "-c", script], check=True)


def test_every_call_of_bitproof_is_one_that_bitproof_takes():
    found = [line for step in STEPS for line in commands(step.get("run", ""))]
    assert [line[0] for line in found] == ["doctor", "run", "merge"]
    for line in found:
        assert main([*line, "--help"]) == 0, "which is said when everything before it was understood"


@pytest.mark.parametrize("line", ["run --shards 1/2", "merge --db x", "history add x", "nightly"])
def test_the_check_of_calls_sees_what_bitproof_does_not_take(line):
    assert main([*line.split(), "--help"]) == 2


def test_the_workflow_asks_for_no_more_than_it_needs():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert set(WORKFLOW[True]) == {"schedule", "workflow_dispatch"}
    assert WORKFLOW["concurrency"] == {"group": "nightly", "cancel-in-progress": False}
    for job in JOBS.values():
        assert job["timeout-minutes"] > 0 and job["runs-on"] == ["self-hosted", "gpu-8"]
    assert all(re.fullmatch(r"actions/[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in STEPS if "uses" in step)
    assert all("${{" not in step.get("run", "") for step in STEPS), (
        "what people type reaches a shell as a variable only"
    )
    assert WORKFLOW["defaults"]["run"]["shell"] == "bash", "which stops at the first failure, in pipes too"


def foreign(name: str) -> Case:
    """A case of a user's systems, whose counts are not held against a model: commands that read it need no torch."""
    return case(name, reference="mine.py:make", candidate="mine.py:make")


@pytest.fixture
def nightly(tmp_path):
    """A function that runs one night: the exit status, and the runner.

    A shard gets one verdict for all its cases, or ends with a status and leaves nothing; so do lost faults.
    """
    program = tmp_path / "bin" / "bitproof"
    program.parent.mkdir()
    for name, text in (("bitproof", PROGRAM), ("python", PYTHON)):
        program.with_name(name).write_text(text.format(made=shlex.quote(str(tmp_path / "made"))))
        program.with_name(name).chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"

    def run(night: int, shards: tuple[str | int, ...] = ("EQUAL", "EQUAL"), killed: int | None = 3):
        run_id = f"2026010{night}T030405Z-abcdef"
        made = tmp_path / "made" / run_id
        made.mkdir(parents=True)

        def leave(what: str, status: int, folder: Path | None) -> None:
            (made / f"{what}.status").write_text(str(status))
            if folder is not None:
                (folder / "report.md").write_text(f"# {what}")

        for index, end in enumerate(shards, 1):
            if isinstance(end, int):
                leave(f"shard{index}", end, None)
                continue
            cases, verdicts = [foreign("a"), foreign("b")], dict.fromkeys("ab", end)
            folder = write_shard(made, index, len(shards), cases, verdicts=verdicts, run_id=run_id)
            leave(f"shard{index}", {"EQUAL": 0, "DIFFERENT": 1}[end], folder)
        leave("targets", 1 if killed is None else int(killed < 3), None)
        if killed is not None:
            measured, score = [result(foreign("measured"))], Score(faults=3, killed=killed)
            write_report(made / "faults", measured, run_id=run_id, faults=score)
        runner = Runner(
            WORKFLOW, tmp_path, {"PATH": path, "EXPRESSION": "a or b", "RUN_ID": run_id}, skipped=("Install bitproof",)
        )
        status = runner.run(run_id=str(night))
        calls = (made / "calls").read_text().splitlines()
        assert [re.split(" --report-dir | --folder ", call)[0] for call in calls] == CALLS
        return status, runner

    return run


def report_of(runner: Runner):
    return report_json.read(runner.folder / "artifacts" / "nightly" / "report.json")


@pytest.mark.ranks
def test_nights_end_as_they_should_and_are_kept(nightly, tmp_path):
    """A good one; one with a difference; one that would not have caught a fault."""
    status, runner = nightly(1)
    assert (status, set(runner.results.values())) == (0, {"success"}), runner.output
    assert [result.verdict.value for result in report_of(runner).cases] == ["EQUAL", "EQUAL"]
    assert report_of(runner).faults == Score(faults=3, killed=3)
    assert (tmp_path / "artifacts" / "shard-2" / "report.json").is_file()
    status, runner = nightly(2, shards=("EQUAL", "DIFFERENT"))
    assert status == 1, runner.output
    assert [name for name, outcome in runner.results.items() if outcome != "success"] == ["End as the run did"]
    assert [result.verdict.value for result in report_of(runner).cases] == ["EQUAL", "DIFFERENT"]
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("# shard1") == summary.count("# shard2") == 2
    assert summary.count("# targets1") == summary.count("# targets2") == 2
    assert "Exit status 1: some case did not get its expected verdict." in summary
    status, runner = nightly(3, killed=2)
    assert (status, runner.jobs["targets"], report_of(runner).faults) == (1, 1, Score(faults=3, killed=2))
    assert [result.case.name for result in report_of(runner).cases] == ["a", "b"]
    summary = (tmp_path / "summary.md").read_text()
    assert "bitproof faults: 2 of 3 faults killed" in summary


@pytest.mark.ranks
def test_a_night_whose_faults_are_lost_is_judged_by_its_cases_and_its_own_job_fails(nightly, tmp_path):
    status, runner = nightly(1, killed=None)
    assert (status, runner.jobs["targets"] > 0, report_of(runner).faults) == (0, True, None), runner.output


@pytest.mark.ranks
def test_a_night_whose_shard_is_lost_is_not_judged(nightly, tmp_path):
    status, runner = nightly(3, shards=(137, "EQUAL"))
    assert status == 3, runner.output
    assert [result.verdict.value for result in report_of(runner).cases] == ["UNVERIFIED", "EQUAL"]


@pytest.mark.ranks
def test_a_night_that_leaves_nothing_is_not_judged(nightly, tmp_path):
    status, runner = nightly(4, shards=(2, 2))
    assert status == 3, runner.output
    assert [name for name, outcome in runner.results.items() if outcome != "success"] == ["End as the run did"]
    assert sorted(path.name for path in (tmp_path / "artifacts").iterdir()) == ["faults", "targets-1", "targets-2"]
