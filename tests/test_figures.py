"""The nightly's targets against their goals: what fails one, what resumes, and what an interruption leaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import figures, nightly
from tests.figures import Goal, num_passed, printed_figures, read_goals
from tests.workflow import read_workflow

ROOT = Path(__file__).parents[1]
GOALS = read_goals()


def goals_file(folder: Path, **targets: str) -> Path:
    """A file of goals, at least 2 each, whose targets run these commands of a shell."""
    text = 'commit = "abc"\nmachine = "this one"\n'
    for name, script in targets.items():
        run = json.dumps(f"sh -c {json.dumps(script)}")
        text += f'[targets.{name}]\nrun = {run}\nshows = "it"\nunit = "things"\nat_least = 2\nminutes = 0.1\n'
    path = folder / "goals.toml"
    path.write_text(text)
    return path


class Nights:
    """A repository with one commit, and nights in a folder beside it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.folder, self.beside = folder / "root", folder / "night", folder
        self.root.mkdir()
        for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "one", "--allow-empty")):
            self.git(*words)
        monkeypatch.setattr(nightly, "ROOT", self.root)

    def git(self, *words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *author, *words], cwd=self.root, check=True)

    def run(self, *words: str, **targets: str) -> int:
        path = goals_file(self.beside, **targets)
        return nightly.main(["--goals", str(path), "--folder", str(self.folder), *words])

    def rows(self) -> dict[str, Any]:
        return {row["name"]: row for row in json.loads((self.folder / "nightly.json").read_text())["targets"]}


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    return Nights(tmp_path, monkeypatch)


def counted(nights: Nights, name: str, figure: str = "3") -> str:
    """A script that prints its figure and notes that it ran."""
    return f"echo {name} >> {nights.beside}/ran; echo FIGURE {name} {figure} things"


def ran(nights: Nights) -> list[str]:
    return (nights.beside / "ran").read_text().split()


@pytest.mark.ranks
def test_a_night_whose_targets_hold_their_goals_ends_with_0_and_its_last_lines_are_the_table(nights, capsys):
    assert nights.run(a=counted(nights, "a"), b=counted(nights, "b", "2")) == 0
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-4].startswith("| a | it | 3 | things | at least 2 | held |")
    assert lines[-3].startswith("| b | it | 2 | things | at least 2 | held |")
    assert lines[-1].startswith("2 of 2 targets held their goals: ")
    assert "| a " in (nights.folder / "nightly.md").read_text()
    assert (nights.folder / "logs" / "a.log").read_text().splitlines()[-1] == "FIGURE a 3 things"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "script, outcome",
    [
        ("echo FIGURE a 1.9", "MISSED"),
        ("echo FIGURE a nan", "MISSED"),
        ("echo FIGURE a 1; exit 1", "MISSED"),
        ("echo FIGURE a 3; exit 3", "exit status 3"),
        ("echo FIGURE a 3; kill -9 $$", "exit status -9"),
        ("echo FIGURE b 3", "no FIGURE lines, expected 1"),
        ("echo FIGURE a 1; echo FIGURE a 3", "2 FIGURE lines, expected 1"),
        ("printf '\\\\377FIGURE a 3'", "no FIGURE lines, expected 1"),
        ("echo FIGURE a 3; touch new", "files, the commit or the environment changed meanwhile"),
    ],
)
def test_a_target_that_misses_its_goal_or_fails_makes_the_status_1(nights, capsys, script, outcome):
    assert nights.run(a=script) == 1
    assert re.sub(" +", " ", capsys.readouterr().out.splitlines()[-3]).split(" | ")[5] == outcome


@pytest.mark.ranks
def test_a_command_that_is_not_there_fails_its_target_and_the_next_one_runs(nights):
    path = goals_file(nights.beside, a="true", b=counted(nights, "b"))
    path.write_text(path.read_text().replace('run = "sh -c \\"true\\""', 'run = "no-such-command"'))
    assert nightly.main(["--goals", str(path), "--folder", str(nights.folder)]) == 1
    assert nights.rows()["a"]["problem"].startswith("cannot start: ")
    assert ran(nights) == ["b"]


@pytest.mark.ranks
def test_a_resumed_night_runs_only_what_did_not_hold(nights):
    good, bad = counted(nights, "good"), counted(nights, "bad", "1")
    assert nights.run(good=good, bad=bad) == 1
    assert nights.run("--resume", good=good, bad=bad) == 1
    assert ran(nights) == ["good", "bad", "bad"]
    assert nights.run("--resume", good=good, bad=counted(nights, "bad", "2")) == 0
    assert nights.run("--resume", good=good, bad=bad) == 0, "nothing is left to run"
    assert ran(nights) == ["good", "bad", "bad", "bad"]
    assert nights.run(good=good, bad=bad) == 1, "without --resume all run again"


@pytest.mark.ranks
def test_another_commit_a_changed_file_and_a_new_file_start_over(nights, capsys):
    (nights.root / "file").write_text("1")
    nights.git("add", ".")
    nights.git("commit", "-q", "-m", "two")
    target = counted(nights, "a")
    assert nights.run(a=target) == 0
    nights.git("commit", "-q", "-m", "three", "--allow-empty")
    assert nights.run("--resume", a=target) == 0 and len(ran(nights)) == 2
    assert "starts over: commit was" in capsys.readouterr().out
    (nights.root / "file").write_text("2")
    assert nights.run("--resume", a=target) == 0 and len(ran(nights)) == 3
    assert "starts over: the working tree is not clean" in capsys.readouterr().out
    assert nights.run("--resume", a=target) == 0 and len(ran(nights)) == 4, "nor is it clean the next time"
    (nights.root / "file").write_text("1")
    assert nights.run("--resume", a=target) == 0 and len(ran(nights)) == 5, "what a dirty tree left is of no commit"
    (nights.root / "new").write_text("")
    assert nights.run("--resume", a=target) == 0 and len(ran(nights)) == 6


@pytest.mark.ranks
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["identity"].update(torch="9.9"),
        lambda content: content.update(identity=None),
        lambda content: content["targets"][0].update(figure=1.0),
        lambda content: content["targets"][0].update(status=1),
        lambda content: content["targets"][0].update(name="b"),
        lambda content: content["targets"][0].pop("status"),
        lambda content: content.clear(),
    ],
)
def test_a_row_of_another_environment_or_one_that_does_not_hold_is_run_again(nights, change):
    assert nights.run(a=counted(nights, "a")) == 0
    file = nights.folder / "nightly.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    assert nights.run("--resume", a=counted(nights, "a")) == 0
    assert ran(nights) == ["a", "a"]


@pytest.mark.ranks
@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_a_state_that_is_no_state_starts_over(nights, content):
    nights.folder.mkdir()
    (nights.folder / "nightly.json").write_text(content)
    assert nights.run("--resume", a=counted(nights, "a")) == 0
    assert nights.rows()["a"]["figure"] == 3


@pytest.mark.ranks
def test_only_and_parts_choose_and_keep_the_rows_of_others(nights, capsys):
    targets = {name: counted(nights, name) for name in ("a", "b", "c")}
    assert nights.run("--only", "b", **targets) == 0
    assert nights.run("--only", "a", "c", **targets) == 0
    assert ran(nights) == ["b", "a", "c"]
    assert nights.run("--resume", **targets) == 0 and len(ran(nights)) == 3
    with pytest.raises(SystemExit, match="2"):
        nights.run("--only", "d", **targets)
    assert "--only d is no target of `night`; there are a, b, c" in capsys.readouterr().err
    for part in ("0/2", "3/2", "1", "a/b", "1/2/3"):
        with pytest.raises(SystemExit, match="2"):
            nights.run("--part", part, **targets)


@pytest.mark.ranks
def test_a_target_beyond_its_limit_is_ended_with_all_its_processes(nights, monkeypatch):
    monkeypatch.setattr(nightly, "limit_of", lambda goal: 1 / 60)
    assert nights.run(a="echo FIGURE a 3; sleep 98765 & sleep 98765") == 1
    assert nights.rows()["a"]["problem"] == "over its limit of 0 minutes"
    assert not is_running("sleep 98765")


def is_running(command: str) -> bool:
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return command in done.stdout.splitlines()


DRIVER = """
import sys
from pathlib import Path
from tests import nightly
nightly.ROOT = Path(sys.argv[1])
sys.exit(nightly.main(sys.argv[2:]))
"""


def start(nights: Nights, *words: str, **targets: str) -> subprocess.Popen[str]:
    """A night in a process of its own."""
    path = goals_file(nights.beside, **targets)
    command = [sys.executable, "-c", DRIVER, str(nights.root), "--goals", str(path), "--folder", str(nights.folder)]
    return subprocess.Popen([*command, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.05)


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_night_ends_its_target_and_resumes_with_it(nights, number):
    first, last = counted(nights, "first"), counted(nights, "last")
    stuck = f"sleep 87654 & touch {nights.beside}/stuck; echo FIGURE stuck 3 things; sleep 87654"
    process = start(nights, first=first, stuck=stuck, last=last)
    wait_for(nights.beside / "stuck")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted; `--resume` goes on from here" in output
    assert not is_running("sleep 87654")
    assert nights.rows()["stuck"]["problem"] == "interrupted", "though its figure was printed"
    assert "last" not in nights.rows() and ran(nights) == ["first"]
    assert nights.run("--resume", first=first, stuck=counted(nights, "stuck"), last=last) == 0
    assert ran(nights) == ["first", "stuck", "last"]


@pytest.mark.ranks
def test_a_killed_night_keeps_what_held_and_no_other_begins_while_its_target_runs(nights, capsys):
    first = counted(nights, "first")
    stuck = f"touch {nights.beside}/stuck; while [ ! -e {nights.beside}/go ]; do sleep 0.1; done"
    process = start(nights, first=first, stuck=stuck)
    wait_for(nights.beside / "stuck")
    process.kill()
    process.wait()
    process.stdout.close()
    assert nights.run("--resume", first=first, stuck=counted(nights, "stuck")) == 2
    assert "is in use: another night runs there, or a process of one is left" in capsys.readouterr().err
    (nights.beside / "go").touch()
    until = time.monotonic() + 60
    while (status := nights.run("--resume", first=first, stuck=counted(nights, "stuck"))) == 2:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert status == 0 and ran(nights) == ["first", "stuck"]


def test_the_figure_that_a_benchmark_prints_is_what_the_night_reads_and_its_status_says_whether_it_holds(capsys):
    assert figures.figure("bench.digest", 10.2) == 0
    assert figures.figure("bench.digest", 4.9) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "FIGURE bench.digest 10.2 GB/s, at least 5: held",
        "FIGURE bench.digest 4.9 GB/s, at least 5: MISSED",
    ]
    assert printed_figures(lines, "bench.digest") == [10.2, 4.9]
    assert printed_figures(lines, "bench") == []
    with pytest.raises(KeyError):
        figures.figure("bench.unknown", 1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"at_most": 1.0},
        {"at_least": None},
        {"at_least": float("nan")},
        {"minutes": 0},
        {"timed": "guess"},
        {"every": "day"},
        {"shows": ""},
        {"run": ()},
    ],
)
def test_a_goal_without_a_bound_a_time_or_a_meaning_is_refused(change):
    good: dict[str, Any] = {"name": "a", "run": ("true",), "shows": "it", "unit": "s", "at_least": 2, "minutes": 1}
    good |= {"timed": "measured", "every": "night", "commit": "abc", "machine": "this"}
    Goal(**good)
    with pytest.raises(ValueError, match=r"a in goals\.toml needs"):
        Goal(**(good | change))


JUNIT = "<testsuites><testsuite><testcase/><testcase/><testcase>{}</testcase></testsuite></testsuites>"


@pytest.mark.parametrize("what, passed", [("", 3), ("<failure/>", 2), ("<error/>", 2), ("<skipped/>", 2)])
def test_only_tests_that_passed_count(tmp_path, what, passed):
    file = tmp_path / "junit.xml"
    file.write_text(JUNIT.format(what))
    assert num_passed(file) == passed


@pytest.mark.ranks
@pytest.mark.parametrize(
    "script, status, said",
    [
        ("cp junit report.xml", 0, "FIGURE cuda-wheel-lane 4 cases, at least 4: held"),
        ("cp few report.xml", 1, "FIGURE cuda-wheel-lane 3 cases, at least 4: MISSED"),
        ("true", 1, "cuda-wheel-lane: 1 of 1 reports were not written: report.xml"),
        ("rm report.xml", 1, "cuda-wheel-lane: 1 of 1 reports were not written: report.xml"),
    ],
)
def test_a_report_counts_only_if_the_command_wrote_it(tmp_path, monkeypatch, capfd, script, status, said):
    monkeypatch.chdir(tmp_path)
    for name, more in (("junit", "<testcase/>"), ("few", ""), ("report.xml", "<testcase/>")):
        Path(name).write_text(f"<testsuite>{more}<testcase/><testcase/><testcase/></testsuite>")
    assert figures.main(["cuda-wheel-lane", "report.xml", "--", "sh", "-c", script]) == status
    assert said in capfd.readouterr().out


@pytest.mark.parametrize("words", [[], ["a"], ["a", "--"], ["a", "--", "true"], ["a", "f", "--"], ["--", "a", "f"]])
def test_a_wrong_call_of_figures_says_how_it_is_called(words, capsys):
    assert figures.main(words) == 2
    assert "python -m tests.figures NAME FILE... -- COMMAND..." in capsys.readouterr().err


def test_a_night_takes_less_than_three_hours_and_each_part_of_the_workflow_about_the_same():
    night = [goal for goal in GOALS.values() if goal.every == "night"]
    assert sum(goal.minutes for goal in night) <= 180
    parts = [nightly.part_of(night, index, 2) for index in (1, 2)]
    assert sorted(goal.name for part in parts for goal in part) == sorted(goal.name for goal in night)
    first, second = (sum(goal.minutes for goal in part) for part in parts)
    assert abs(first - second) <= 5


@pytest.mark.ranks
def test_each_target_runs_a_module_that_is_there_or_a_target_of_the_makefile():
    for goal in GOALS.values():
        words = list(goal.run)
        if words[:3] == ["python", "-m", "tests.figures"]:
            assert words[3] == goal.name
            words = words[words.index("--") + 1 :]
        if words[0] == "make":
            done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{goal.name}: {done.stderr}"
        else:
            assert words[:2] == ["python", "-m"]
            path = ROOT / f"{words[2].replace('.', '/')}.py"
            assert f'"{goal.name}' in path.read_text() or goal.name == "fuzz.prove_moe_seq", goal.name


def test_every_figure_that_a_benchmark_prints_has_a_goal():
    printed = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name != "test_figures.py":
            printed |= set(re.findall(r'figure\(\s*"([\w.-]+)"', path.read_text()))
    assert len(printed) > 20 and printed <= set(GOALS)


def test_the_workflow_runs_the_same_list_in_as_many_parts_as_it_has_machines():
    jobs = read_workflow(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]
    calls = [
        step["run"]
        for job in jobs.values()
        for step in job["steps"]
        if "tests.nightly" in step.get("run", "") and "part" in job.get("strategy", {}).get("matrix", {})
    ]
    assert len(calls) == 1 and 'tests.nightly night --part "$PART"' in calls[0]
    widths = [len(next(iter(job["strategy"]["matrix"].values()))) if "strategy" in job else 1 for job in jobs.values()]
    assert max(widths) == 2, "as many as the file's comment counts"
    later = [name for name, job in jobs.items() if "needs" in job]
    assert len(later) == len(jobs) - 1, "jobs run one after another, so no more machines than one job's"
