"""Output that nobody takes, in real processes and by hand."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys

import pytest

from bitproof.harness.case.case_file import case_text
from bitproof.harness.runtime import output
from tests.harness.execute.test_launch import ROOT, toy

pytestmark = pytest.mark.ranks

FORMS = ["junit.xml", "report.html", "report.json", "report.md", "report.sarif"]

# Cases that end at once with EQUAL.
STUBBED = """
import sys
from dataclasses import replace
from bitproof.harness.execute import launch
from bitproof.harness.records import Event
from tests.harness.commands.test_run import equal

def run_cases(cases, options, run_dir, on_event):
    for case in cases:
        on_event(Event(event="start", case=case.name, system="graph", arm="first"))
        yield replace(equal(case), steps=case.steps, world_size=case.parallelism.world_size, error=ERROR)

launch.run_cases = run_cases
from bitproof.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def bitproof(tmp_path):
    """Run a command over stubbed cases: one that is as expected, or else one that is not."""

    def run(*arguments: str, as_expected: bool = True, error: str | None = None, **options):
        case_file = tmp_path / "toy.json"
        values = json.loads(case_text(toy()))
        case_file.write_text(
            json.dumps(values | ({} if as_expected else {"expected": "DIFFERENT", "differs": ["grad"]}))
        )
        where = ["--case", str(case_file), "--report-dir", str(tmp_path / "reports")] if arguments == ("run",) else []
        code = STUBBED.replace("ERROR", repr(error))
        options = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "timeout": 120} | options
        return subprocess.run([sys.executable, "-c", code, *arguments, *where], **options)

    return run


def written(tmp_path):
    latest = tmp_path / "reports" / "latest"
    assert sorted(path.name for path in latest.iterdir()) == FORMS
    return json.loads((latest / "report.json").read_text())


@pytest.mark.parametrize(("as_expected", "status"), [(True, 0), (False, 1)])
def test_a_reader_that_leaves_changes_neither_report_nor_status_and_is_not_reported(
    bitproof, tmp_path, as_expected, status
):
    reader, writer = os.pipe()
    os.close(reader)
    done = bitproof("run", as_expected=as_expected, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, "")
    assert written(tmp_path)["exit_status"] == status


@pytest.mark.parametrize(("as_expected", "status"), [(True, 0), (False, 1)])
def test_a_run_whose_output_is_on_a_full_disk_goes_on_and_says_so(bitproof, tmp_path, as_expected, status):
    with open("/dev/full", "w") as full:
        done = bitproof("run", as_expected=as_expected, stdout=full)
    assert done.stderr == "bitproof: standard output cannot be written: No space left on device\n"
    assert (done.returncode, written(tmp_path)["exit_status"]) == (status, status)


def test_a_run_without_standard_output_goes_on_and_says_so(bitproof, tmp_path):
    done = bitproof("run", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "bitproof: standard output cannot be written: it is closed\n")
    assert written(tmp_path)["exit_status"] == 0


def test_a_run_without_any_standard_descriptor_has_its_report_and_its_status(bitproof, tmp_path):
    def close_all() -> None:
        os.closerange(0, 3)

    done = bitproof("run", as_expected=False, stderr=None, preexec_fn=close_all)
    assert (done.returncode, written(tmp_path)["exit_status"]) == (1, 1)


def test_a_run_whose_errors_nobody_can_read_keeps_its_status(bitproof, tmp_path):
    with open("/dev/full", "w") as full:
        done = bitproof("run", stdout=full, stderr=full)
    assert (done.returncode, written(tmp_path)["exit_status"]) == (0, 0)


def test_a_command_that_only_prints_and_cannot_ends_with_3(bitproof):
    with open("/dev/full", "w") as full:
        done = bitproof("list", stdout=full)
    text = "bitproof: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (3, text)


def test_a_command_that_only_prints_to_a_reader_that_leaves_ends_with_0(bitproof):
    reader, writer = os.pipe()
    os.close(reader)
    done = bitproof("list", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_room_for_the_report_the_verdicts_are_printed_none_of_its_files_is_left_and_the_status_is_3(
    bitproof, tmp_path
):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = bitproof("run", stdout=subprocess.PIPE, preexec_fn=limit)
    [run_dir] = (tmp_path / "reports").iterdir()
    assert done.returncode == 3
    assert "1 EQUAL" in done.stdout and "report.md" not in done.stdout
    assert done.stderr == (
        "RecordingError: the report cannot be written\n"
        "  found: File too large\n"
        f"  came from: {run_dir}\n"
        "  fix: the verdicts are those printed; make room, or choose another folder with --report-dir\n"
    )
    assert os.listdir(run_dir) == []


def test_half_of_a_character_in_an_error_is_spelled_out_everywhere(bitproof, tmp_path):
    done = bitproof("run", as_expected=False, error="RankError: \udc80 and \ud83d", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "")
    assert r"RankError: \udc80 and \ud83d" in done.stdout
    assert written(tmp_path)["cases"][0]["error"] == "RankError: \udc80 and \ud83d"


def test_what_an_encoding_lacks_is_spelled_out():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    safe = output.SafeStream(stream)
    safe.writelines(["é", "\udc80", "!"])
    safe.flush()
    assert stream.buffer.getvalue() == b"\\xe9\\udc80!"
    assert (safe.lost, safe.encoding) == (None, "ascii")


def test_both_streams_come_back():
    before = sys.stdout, sys.stderr
    with output.safe_output() as printed:
        assert sys.stdout is printed and sys.stderr is not before[1]
    assert (sys.stdout, sys.stderr) == before
