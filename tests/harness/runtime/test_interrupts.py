"""Signals at every moment of every command that starts something, in real processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from bitproof.harness.case.case_file import case_text
from bitproof.harness.runtime import interrupts
from tests.harness.execute.test_launch import ROOT, nothing_left_behind, toy
from tests.sweeps import sweep

FORMS = ["junit.xml", "report.html", "report.json", "report.md", "report.sarif"]

# Cases that end at once, or not at all, and a report that takes its time.
STUBBED = """
import sys, time
from dataclasses import replace
from bitproof.harness.execute import launch
from bitproof.harness.report import write
from tests.harness.commands.test_run import equal

def run_cases(cases, options, run_dir, on_event):
    for case in cases:
        if case.name == "endless":
            print("running", flush=True)
            time.sleep(60)
        yield replace(equal(case), steps=case.steps, world_size=case.parallelism.world_size)

def write_slowly(path, content, write=write.write_atomically):
    print("writing", flush=True)
    time.sleep(0.1)
    write(path, content)

launch.run_cases, write.write_atomically = run_cases, write_slowly
from bitproof.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def start(tmp_path, tmp_path_factory):
    """Start a program of ours with some arguments; in the end nothing of it may be left."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(nothing_left_behind(tmp_path_factory.mktemp("temporary")))

        def popen(*arguments, program=("-m", "bitproof"), **options):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
            process = stack.enter_context(subprocess.Popen([sys.executable, *program, *arguments], **pipes | options))
            watchdog = threading.Timer(120, process.kill)
            watchdog.start()
            stack.callback(watchdog.cancel)
            return process

        yield popen


def command_line(command: str, tmp_path: Path) -> list[str]:
    """A call of a command, whose report goes into the folder `reports`."""
    case_file = tmp_path / "toy.json"
    case_file.write_text(case_text(toy("hanging")))
    case = {"run": ["--case", str(case_file)], "bisect": ["moe_seq", "--world-size", "2"]}.get(
        command, [str(case_file)]
    )
    target = ["--system", case_systems()[0], "--out", str(tmp_path / "out")] if command == "record" else []
    return [command, *case, *target, "--device", "cpu", "--report-dir", str(tmp_path / "reports")]


def case_systems():
    return toy().reference, toy().candidate


def wait_for(process, line: str) -> None:
    for seen in process.stdout:
        if line in seen:
            return
    raise AssertionError(f"{line!r} was never printed: {process.stderr.read()}")


def host_log(tmp_path: Path) -> Path:
    """The host's log, as soon as there is a host."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if found := list((tmp_path / "reports").glob("*/logs/host.log")):
            return found[0]
        time.sleep(0.01)
    raise AssertionError("no host was started")


def ended(process) -> tuple[int, str]:
    """Exit status and what stands on standard error."""
    process.stdout.read()
    text = process.stderr.read()
    return process.wait(), text


def check_what_is_left(command: str, tmp_path: Path) -> None:
    """An interrupted run has its report; a recording, that has none, leaves nothing."""
    reports = tmp_path / "reports"
    if command == "record":
        assert (list(reports.iterdir()), (tmp_path / "out").exists()) == ([], False)
        return
    report = json.loads((reports / "latest" / "report.json").read_text())
    assert (report["exit_status"], [case["verdict"] for case in report["cases"]]) == (3, ["UNVERIFIED"])
    assert "interrupted" in report["cases"][0]["error"]
    assert sorted(path.name for path in (reports / "latest").iterdir() if path.name in FORMS) == FORMS
    extra = {"bisect": "bisect.json", "localize": "localize.json"}.get(command)
    assert extra is None or (reports / "latest" / extra).is_file()


@pytest.mark.ranks
@pytest.mark.parametrize("number", sweep(interrupts.SIGNALS, signal.SIGINT))
def test_an_interrupt_while_the_program_is_imported_ends_it_with_3_and_leaves_nothing(start, tmp_path, number):
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "typer.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    process = start(*command_line("run", tmp_path), env=os.environ | {"PYTHONPATH": str(slow)})
    wait_for(process, "importing")
    process.send_signal(number)
    assert ended(process) == (3, "bitproof: interrupted\n")
    assert not (tmp_path / "reports").exists()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("command", "number"),
    sweep(
        [
            *(("run", number) for number in interrupts.SIGNALS),
            ("record", signal.SIGTERM),
            ("record", signal.SIGINT),
            ("shrink", signal.SIGINT),
            ("bisect", signal.SIGHUP),
            ("localize", signal.SIGQUIT),
        ],
        ("run", signal.SIGTERM),
        ("record", signal.SIGINT),
        ("bisect", signal.SIGHUP),
        ("localize", signal.SIGQUIT),
    ),
)
def test_an_interrupt_before_ranks_start_ends_with_3_a_report_and_nothing_left_behind(start, tmp_path, command, number):
    process = start(*command_line(command, tmp_path))
    wait_for(process, "bitproof: ")
    host_log(tmp_path)
    process.send_signal(number)
    status, reported = ended(process)
    assert (status, "Traceback" in reported) == (3, False), reported
    assert "interrupted" in reported or command == "bisect"
    check_what_is_left(command, tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("command", "number"), [("run", signal.SIGHUP), pytest.param("record", signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupt_while_ranks_hang_ends_with_3_a_report_and_nothing_left_behind(start, tmp_path, command, number):
    arguments = command_line(command, tmp_path)
    if command == "record":
        arguments[arguments.index("--system") + 1] = case_systems()[1].replace("steady", "hanging")
    process = start(*arguments)
    for _ in range(2 if command == "run" else 1):
        wait_for(process, "start ranks")
    time.sleep(0.5)
    process.send_signal(number)
    process.send_signal(number)  # an impatient user's second Ctrl-C changes nothing
    status, reported = ended(process)
    assert (status, "Traceback" in reported) == (3, False), reported
    left = list((tmp_path / "reports").iterdir())
    if command == "record":
        assert not (tmp_path / "out").exists()
        assert all(path.name == "logs" for folder in left for path in folder.iterdir())
    else:
        check_what_is_left(command, tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("number", sweep(interrupts.SIGNALS, signal.SIGTERM))
def test_a_signal_while_the_report_is_written_is_too_late(start, tmp_path, number):
    case_file = tmp_path / "toy.json"
    case_file.write_text(case_text(toy()))
    arguments = ("run", "--case", str(case_file), "--report-dir", str(tmp_path / "reports"))
    process = start(*arguments, program=("-c", STUBBED))
    wait_for(process, "writing")
    process.send_signal(number)
    assert ended(process) == (0, "")
    latest = tmp_path / "reports" / "latest"
    assert sorted(path.name for path in latest.iterdir()) == FORMS
    assert json.loads((latest / "report.json").read_text())["exit_status"] == 0


@pytest.mark.ranks
def test_a_second_signal_while_the_report_of_an_interrupted_run_is_written_is_too_late(start, tmp_path):
    case_file = tmp_path / "endless.json"
    case_file.write_text(case_text(toy(name="endless")))
    arguments = ("run", "--case", str(case_file), "--report-dir", str(tmp_path / "reports"))
    process = start(*arguments, program=("-c", STUBBED))
    wait_for(process, "running")
    process.send_signal(signal.SIGINT)
    wait_for(process, "writing")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    status, reported = ended(process)
    assert (status, reported) == (3, "bitproof: interrupted; the cases that were not finished are UNVERIFIED\n")
    check_what_is_left("run", tmp_path)


@pytest.mark.ranks
def test_a_terminal_that_is_closed_ends_a_run_with_3_and_a_report(start, tmp_path):
    case_file = tmp_path / "endless.json"
    case_file.write_text(case_text(toy(name="endless")))
    arguments = ("run", "--case", str(case_file), "--report-dir", str(tmp_path / "reports"))
    terminal, end = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), end)
    process = start(*arguments, program=("-c", STUBBED), preexec_fn=take_terminal, **streams)
    os.close(end)
    seen = b""
    while b"running" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait() == 3
    check_what_is_left("run", tmp_path)


@pytest.mark.ranks
def test_a_signal_that_the_caller_ignores_as_nohup_does_stays_ignored(start, tmp_path):
    case_file = tmp_path / "toy.json"
    case_file.write_text(case_text(toy()))
    arguments = ("run", "--case", str(case_file), "--report-dir", str(tmp_path / "reports"))
    code = f"import os, signal; os.kill(os.getpid(), signal.SIGHUP)\n{STUBBED}"
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    process = start(*arguments, program=("-c", code), preexec_fn=ignore)
    wait_for(process, "writing")
    process.send_signal(signal.SIGHUP)
    assert ended(process)[0] == 0


def test_an_interrupt_waits_until_what_must_not_be_left_half_done_is_done():
    done = []
    with interrupts.raising(), pytest.raises(interrupts.Interrupt), interrupts.held():
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("in the block")
    assert done == ["in the block"]


def test_an_interrupt_that_waits_is_the_first_that_is_let_in():
    with interrupts.raising(), interrupts.held():
        os.kill(os.getpid(), signal.SIGQUIT)
        with pytest.raises(interrupts.Interrupt), interrupts.let_in():
            raise AssertionError("the block began")


def test_only_one_interrupt_is_raised_while_cleaning_up_and_another_after_the_time_that_this_takes(monkeypatch):
    with interrupts.raising():
        with pytest.raises(interrupts.Interrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        monkeypatch.setattr(interrupts, "GRACE_SECONDS", 0.0)
        with pytest.raises(interrupts.Interrupt):
            os.kill(os.getpid(), signal.SIGHUP)


def test_handlers_come_back():
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    with interrupts.raising(), interrupts.raising():
        interrupts.too_late()
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before


@pytest.mark.ranks
@pytest.mark.parametrize("number", sweep(interrupts.SIGNALS, signal.SIGHUP, signal.SIGQUIT))
def test_before_anything_is_loaded_the_command_ends_with_3_and_no_traceback(number: signal.Signals) -> None:
    code = (
        f"import os, bitproof.__main__ as m; m._end_when_interrupted(); os.kill(os.getpid(), {int(number)}); m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (interrupts.STATUS, "", f"{interrupts.MESSAGE}\n")


WAITS = """
import sys
from bitproof.harness.runtime import interrupts
with interrupts.raising():
    interrupts.too_late()
    print("waits", flush=True)
    interrupts.wait(60)
sys.exit(7)
"""


@pytest.mark.ranks
def test_one_who_only_waits_ends_early_with_its_own_status_when_asked_to(start):
    process = start(program=("-c", WAITS))
    assert process.stdout.readline() == "waits\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 7
    assert time.monotonic() - began < 20
