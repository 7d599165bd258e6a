from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bitproof.harness import execute
from bitproof.harness.case import Case, Chunking
from bitproof.harness.commands import run
from bitproof.harness.commands.run import run_and_report
from bitproof.harness.errors import CaseError, PassError, RankError, UsageError
from bitproof.harness.options import RunOptions, Stress
from bitproof.harness.records import CaseResult, Event, Shard, Verdict
from bitproof.harness.report import json as report_json
from bitproof.harness.runtime import launched

pytestmark = pytest.mark.ranks

COMPARED = dict.fromkeys(("loss", "grad", "param", "buffer", "optimizer"), 1)
FIRST, SECOND = (
    Case(name=name, family="x", chunking=Chunking(dim="seq", modules="layers.*")) for name in ("first", "second")
)


def equal(case: Case) -> CaseResult:
    """A result whose numbers are those of its case."""
    world_size = case.parallelism.world_size
    losses = ["0x1.0p+0"] * case.steps
    return CaseResult(
        case=case,
        verdict=Verdict.EQUAL,
        steps=case.steps,
        world_size=world_size,
        device="cpu",
        backend="gloo",
        compared=dict.fromkeys(COMPARED, case.steps * world_size),
        control={"reference": Verdict.EQUAL, "candidate": Verdict.EQUAL},
        losses={"reference": losses, "candidate": losses},
    )


@pytest.fixture
def launch_with(monkeypatch) -> Callable[..., types.ModuleType]:
    """Put a launcher in place whose cases do what a generator function says."""

    def install(run_cases) -> types.ModuleType:
        fake = types.ModuleType("bitproof.harness.execute.launch")
        fake.RunOptions = RunOptions
        fake.environment = lambda device: {"torch": "2.13.0", "device": device}
        fake.run_cases = run_cases
        monkeypatch.setitem(sys.modules, "bitproof.harness.execute.launch", fake)
        monkeypatch.setattr(execute, "launch", fake, raising=False)
        return fake

    return install


def only_report(report_dir):
    return report_json.read(report_dir / "latest" / "report.json")


def test_a_run_writes_its_report_and_returns_its_status(launch_with, tmp_path, capsys):
    def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
        for case in cases:
            on_event(Event(event="start", case=case.name, system="graph", arm="first"))
            yield equal(case)

    launch_with(run_cases)
    assert run_and_report([FIRST, SECOND], RunOptions(), tmp_path, ["--steps", "1"]) == 0
    report = only_report(tmp_path)
    assert report.environment == {"torch": "2.13.0", "device": "cpu", "backend": "gloo"}
    assert report.options == ("--steps", "1")
    lines = capsys.readouterr().out.splitlines()
    run_dir = tmp_path / report.run_id
    assert lines[0] == f"bitproof: 2 cases (first, second), report in {run_dir}"
    assert any("first graph: start ranks" in line for line in lines)
    assert lines[-1] == f"report: {run_dir / 'report.md'}"


@pytest.mark.parametrize("beside", [False, True])
def test_where_rank_0_is_gone_one_rank_a_machine_reports_what_it_has_heard(
    beside, launch_with, tmp_path, monkeypatch, capsys
):
    reported = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "RANK": str(4 + beside), "LOCAL_RANK": str(int(beside))}
    for name, value in reported.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launched, "reports_for_rank_0", launched.reports_for_its_machine)

    def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
        yield equal(cases[0])
        raise RankError("rank 0 vanished before all was done", rank=0)

    launch_with(run_cases)
    assert run_and_report([FIRST, SECOND], RunOptions(), tmp_path) == 3
    if beside:
        assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
    else:
        report = only_report(tmp_path)
        assert [case.verdict for case in report.cases] == [Verdict.EQUAL, Verdict.UNVERIFIED]
        assert report.cases[1].error == "RankError: rank 0 vanished before all was done"
        assert report.environment["torch"] == "2.13.0"


def test_a_case_that_cannot_be_judged_here_says_so_before_it_runs(launch_with, tmp_path, capsys, monkeypatch):
    def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
        print("it runs")
        yield from map(equal, cases)

    launch_with(run_cases)
    monkeypatch.setattr("bitproof.harness.machine.devices.gpu_models", list)
    run_and_report([replace(FIRST, requires="cuda"), SECOND], RunOptions(), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    text = (
        "first was asked for and cannot be judged here: it needs CUDA; its 8 ranks run on the CPU here (0 GPUs, "
        "--device auto); it runs all the same"
    )
    assert lines[1] == text and lines.index("it runs") > 1 and not any("second was asked" in line for line in lines)


def test_what_reports_are_made_with_is_loaded_before_the_first_verdict(launch_with, tmp_path, monkeypatch):
    done: list[str] = []

    def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
        done.append("asked for a verdict")
        yield equal(cases[0])

    monkeypatch.setattr(run, "warm_up", lambda: done.append("loaded the forms"))
    monkeypatch.setattr(run.terminal, "warm_up", lambda: done.append("loaded the table"))
    launch_with(run_cases)
    assert run_and_report([FIRST], RunOptions(), tmp_path) == 0
    assert done == ["loaded the table", "loaded the forms", "asked for a verdict"]


@pytest.mark.parametrize(
    ("options", "remarks"),
    [
        (RunOptions(), ()),
        (
            RunOptions(control="when_different"),
            (
                "--control when-different: only systems that differ ran twice, so that two agree was not seen a second "
                "time",
            ),
        ),
        (
            RunOptions(control="never"),
            ("--no-control: no system ran twice, so noise was not distinguished from defects",),
        ),
        (
            RunOptions(control="never", stress=Stress(longest_sleep=0.004, num_threads=3)),
            (
                "--no-control: no system ran twice but under stress, so noise was not distinguished from defects",
                "--stress: each system ran once more with random sleeps of up to 4 ms before collectives and waits, "
                "zeros instead of NaN in uninitialized memory; 3 threads an operator, which by itself may move "
                "bits of large sums and products",
            ),
        ),
        (
            RunOptions(stress=Stress()),
            (
                "--stress: each system ran once more with random sleeps of up to 2 ms before collectives and waits, "
                "zeros instead of NaN in uninitialized memory",
            ),
        ),
    ],
)
def test_a_report_shows_how_often_systems_ran(launch_with, tmp_path, capsys, options, remarks):
    launch_with(lambda cases, options, run_dir, on_event: iter([equal(cases[0])]))
    assert run_and_report([FIRST], options, tmp_path) == 0
    assert only_report(tmp_path).remarks == remarks
    shown = capsys.readouterr().out + (tmp_path / "latest" / "report.md").read_text()
    assert [shown.count(remark) for remark in remarks] == [2] * len(remarks)
    assert ("--no-control" in shown, "--stress" in shown) == (options.control == "never", options.stress is not None)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit(143)])
def test_an_interrupted_run_reports_what_was_finished_and_stops_the_launcher(
    launch_with, tmp_path, capsys, interruption
):
    closed = []

    def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
        try:
            yield equal(cases[0])
            raise interruption
        finally:
            closed.append(True)

    launch_with(run_cases)
    assert run_and_report([FIRST, SECOND], RunOptions(), tmp_path) == 3
    assert closed == [True]
    report = only_report(tmp_path)
    assert [(result.case.name, result.verdict, result.error) for result in report.cases] == [
        ("first", Verdict.EQUAL, None),
        ("second", Verdict.UNVERIFIED, "interrupted before this case was finished"),
    ]
    assert "bitproof: interrupted" in capsys.readouterr().err


def test_an_interrupt_between_results_closes_the_launcher_too(launch_with, tmp_path, monkeypatch):
    closed, started = [], []

    def generate(cases) -> Iterator[CaseResult]:
        try:
            for case in cases:
                yield equal(case)
        finally:
            closed.append(True)

    def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
        started.append(generate(cases))  # a second owner, so that nothing but close() ends it
        return started[0]

    def interrupt(self, result):
        raise KeyboardInterrupt

    launch_with(run_cases)
    monkeypatch.setattr("bitproof.harness.report.progress.PlainProgress.on_result", interrupt)
    assert run_and_report([FIRST, SECOND], RunOptions(), tmp_path) == 3
    assert closed == [True]


def test_sigterm_ends_a_run_as_an_interrupt_does_and_its_handler_comes_back(launch_with, tmp_path):
    def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield equal(cases[0])

    before = signal.getsignal(signal.SIGTERM)
    launch_with(run_cases)
    assert run_and_report([FIRST], RunOptions(), tmp_path) == 3
    assert only_report(tmp_path).cases[0].verdict == Verdict.UNVERIFIED
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_shard_says_so_and_an_empty_one_is_a_success(launch_with, tmp_path, capsys):
    launch_with(lambda cases, options, run_dir, on_event: (equal(case) for case in cases))
    selection = (FIRST, SECOND)
    for index, cases in ((1, [FIRST]), (3, [])):
        shard = Shard(index=index, count=3, selection=selection)
        assert run_and_report(cases, RunOptions(), tmp_path, [], {}, shard) == 0
        report = only_report(tmp_path)
        assert (report.shard, [result.case for result in report.cases]) == (shard, cases)
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bitproof:")]
    assert heads[0].startswith("bitproof: shard 1/3, 1 case (first), report in ")
    assert heads[1].startswith("bitproof: shard 3/3, 0 cases, report in ")


def test_a_run_of_nothing_that_is_no_shard_was_not_judged(launch_with, tmp_path):
    launch_with(lambda cases, options, run_dir, on_event: iter(()))
    assert run_and_report([], RunOptions(), tmp_path) == 3


def test_a_case_that_the_launcher_forgets_is_never_dropped(launch_with, tmp_path):
    launch_with(lambda cases, options, run_dir, on_event: iter([equal(cases[0])]))
    assert run_and_report([FIRST, SECOND], RunOptions(), tmp_path) == 3
    assert only_report(tmp_path).cases[1].error == "the launcher gave no result for this case"


def test_a_wrong_call_leaves_no_run_folder_and_is_raised(launch_with, tmp_path):
    def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
        raise CaseError("case first does not fit this machine")

    launch_with(run_cases)
    with pytest.raises(CaseError):
        run_and_report([FIRST], RunOptions(), tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("error", "status"), [(PassError("no"), 3), (UsageError("no"), 2), (ZeroDivisionError(), 3)])
def test_an_error_after_the_first_result_still_leaves_a_report(launch_with, tmp_path, capsys, error, status):
    def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
        yield equal(cases[0])
        raise error

    launch_with(run_cases)
    assert run_and_report([FIRST, SECOND], RunOptions(), tmp_path) == status
    report = only_report(tmp_path)
    assert report.exit_status == status
    assert [result.verdict for result in report.cases] == [Verdict.EQUAL, Verdict.UNVERIFIED]
    assert type(error).__name__ in report.cases[1].error
    assert type(error).__name__ in capsys.readouterr().err


def test_an_unwritable_report_folder_is_found_before_anything_runs(launch_with, tmp_path):
    def run_cases(cases, options, run_dir, on_event):
        raise AssertionError("something ran")

    launch_with(run_cases)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="the report folder cannot be written"):
        run_and_report([FIRST], RunOptions(), tmp_path / "file")


def test_under_torchrun_a_rank_above_0_runs_in_silence_and_leaves_nothing(launch_with, tmp_path, capsys, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    launch_with(lambda cases, options, run_dir, on_event: (equal(case) for case in cases))
    assert run_and_report([FIRST], RunOptions(), tmp_path) == 0
    assert capsys.readouterr().out == ""
    assert os.listdir(tmp_path) == []
