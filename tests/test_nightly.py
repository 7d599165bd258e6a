"""The nightly workflow, run from its own file: every shell step for real, and only cases and installation made up."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bitproof.harness.cli import main
from bitproof.harness.history.database import read_nights
from bitproof.harness.records import Score
from bitproof.harness.report import json as report_json
from tests.workflow import SHELL, Runner, read_workflow

ROOT = Path(__file__).parents[1]
NIGHTLY = ROOT / ".github" / "workflows" / "nightly.yml"
WORKFLOW = read_workflow(NIGHTLY)
JOBS = WORKFLOW["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]

# What stands in for `bitproof` in the steps: `run` writes a shard's report without running anything, and `faults` and
# `sensitivity` write theirs.
PROGRAM = f"""#!{sys.executable}
import os, sys
if sys.argv[1] == "doctor":
    sys.exit(0)
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
if sys.argv[1] == "run":
    from tests.harness.reports import case, write_shard
    options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
    index, count = options["--shard"].split("/")
    what = os.environ.get("SHARD_" + index, "EQUAL")
    assert (options["-k"], options["--device"]) == (os.environ["EXPRESSION"], "cuda")
    if what.isdecimal():
        sys.exit(int(what))
    folder = Path(options["--report-dir"])
    verdicts = dict.fromkeys("ab", what)
    made = write_shard(
        folder.parent, int(index), int(count), [case("a"), case("b")], verdicts=verdicts, run_id=os.environ["RUN_ID"]
    )
    (made / "report.md").write_text("# shard " + index)
    made.parent.rename(folder)
    sys.exit({{"EQUAL": 0, "DIFFERENT": 1, "ERROR": 3}}[what])
if sys.argv[1] in ("faults", "sensitivity"):
    from bitproof.harness.records import Score
    from tests.harness.reports import case, result, write_report
    folder = Path(sys.argv[sys.argv.index("--report-dir") + 1])
    what, killed = sys.argv[1], os.environ.get("KILLED", "3")
    if what == "faults" and not killed:
        sys.exit(3)
    score = Score(faults=3, killed=int(killed)) if what == "faults" else None
    made = write_report(folder, [result(case("measured"))], run_id=os.environ["RUN_ID"], faults=score)
    (made / "report.md").write_text("# " + what)
    sys.exit(0 if killed == "3" else 1)
from bitproof.harness.cli import main
sys.exit(main())
"""


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
    assert [line[0] for line in found] == ["doctor", "run", "faults", "sensitivity", "merge", "history", "history"]
    for line in found:
        assert main([*line, "--help"]) == 0, "which is said when everything before it was understood"


@pytest.mark.parametrize("line", ["run --shards 1/2", "merge --db x", "history keep", "nightly"])
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


@pytest.fixture
def nightly(tmp_path):
    """A function that runs one night: the exit status, and the runner."""
    program = tmp_path / "bin" / "bitproof"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"

    def run(night: int, **shards: str) -> tuple[int, Runner]:
        env = {"PATH": path, "EXPRESSION": "a or b", "RUN_ID": f"2026010{night}T030405Z-abcdef"} | shards
        runner = Runner(WORKFLOW, tmp_path, env, skipped=("Install bitproof",))
        return runner.run(run_id=str(night)), runner

    return run


def report_of(runner: Runner):
    return report_json.read(runner.folder / "artifacts" / "nightly" / "report.json")


def test_a_good_night_and_a_bad_one_end_as_they_should_and_are_kept(nightly, tmp_path):
    status, runner = nightly(1)
    assert (status, set(runner.results.values())) == (0, {"success"}), runner.output
    assert [result.verdict.value for result in report_of(runner).cases] == ["EQUAL", "EQUAL"]
    assert (tmp_path / "artifacts" / "shard-2" / "report.json").is_file()
    status, runner = nightly(2, SHARD_2="DIFFERENT")
    assert status == 1, runner.output
    assert [name for name, outcome in runner.results.items() if outcome != "success"] == ["End as the run did"]
    assert [result.verdict.value for result in report_of(runner).cases] == ["EQUAL", "DIFFERENT"]
    nights = read_nights(tmp_path / "artifacts" / "history" / "history.sqlite", 10)
    assert [night.exit_status for night in nights] == [0, 1]
    assert (tmp_path / "artifacts" / "history" / "history.html").is_file()
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("# shard 1") == summary.count("# shard 2") == 2
    assert "Exit status 1: some case did not get its expected verdict." in summary
    assert "2 nights, " in summary


def test_a_night_that_would_not_have_caught_a_fault_is_not_as_expected(nightly, tmp_path):
    status, runner = nightly(1)
    assert (status, report_of(runner).faults) == (0, Score(faults=3, killed=3))
    status, runner = nightly(2, KILLED="2")
    assert (status, runner.jobs["strength"], report_of(runner).faults) == (1, 1, Score(faults=3, killed=2))
    assert [result.case.name for result in report_of(runner).cases] == ["a", "b"]
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("# sensitivity") == 2
    assert "bitproof faults: 2 of 3 faults killed" in summary and "faults killed 3 of 3 -> 2 of 3" in summary


def test_a_night_whose_faults_are_lost_is_judged_by_its_cases_and_its_own_job_fails(nightly, tmp_path):
    status, runner = nightly(1, KILLED="")
    assert (status, runner.jobs["strength"] > 0, report_of(runner).faults) == (0, True, None), runner.output


def test_a_night_whose_shard_is_lost_is_not_judged(nightly, tmp_path):
    status, runner = nightly(3, SHARD_1="137")
    assert status == 3, runner.output
    assert [result.verdict.value for result in report_of(runner).cases] == ["UNVERIFIED", "EQUAL"]
    assert [night.exit_status for night in read_nights(tmp_path / "artifacts" / "history" / "history.sqlite", 10)] == [
        3
    ]


def test_a_night_that_leaves_nothing_is_not_judged_and_leaves_the_history_alone(nightly, tmp_path):
    (tmp_path / "cache" / "history-0").mkdir(parents=True)
    status, runner = nightly(4, SHARD_1="2", SHARD_2="2")
    assert status == 3, runner.output
    assert [name for name, outcome in runner.results.items() if outcome != "success"] == ["End as the run did"]
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["faults"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_history_that_cannot_be_used_fails_the_night_and_is_not_replaced(nightly, tmp_path):
    (tmp_path / "cache" / "history-0").mkdir(parents=True)
    (tmp_path / "cache" / "history-0" / "history.sqlite").write_text("damaged " * 200)
    status, runner = nightly(5)
    assert status == 3, runner.output
    assert [name for name, outcome in runner.results.items() if outcome != "success"] == [
        "Add this night to the history"
    ]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["history-0"]
    assert report_of(runner).exit_status == 0
