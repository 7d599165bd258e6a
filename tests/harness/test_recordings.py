from __future__ import annotations

import json
from dataclasses import replace

import pytest

from harness.case import Case, Parallelism
from harness.cli import main
from harness.errors import UsageError
from harness.recordings import Target, diff, named_case, record
from harness.run import Changes
from harness.run_options import RunOptions

CPU = RunOptions(device="cpu", timeout=60.0)
CASE = Case(name="toy", family="test", reference="eager", steps=2, parallelism=Parallelism(world_size=2, ep=1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Recordings of a system that repeats itself, once, again, for longer, and with one bit flipped by hand."""
    folder = tmp_path_factory.mktemp("recordings")
    steady = "tests.harness.toy_systems:steady"
    record(CASE, steady, CPU, Target(out=folder / "first"), folder / "reports")
    record(CASE, steady, CPU, Target(out=folder / "again"), folder / "reports")
    record(replace(CASE, steps=3), steady, CPU, Target(out=folder / "longer"), folder / "reports")
    return folder


def told(first, second):
    lines: list[str] = []
    return diff(first, second, lines.append), lines


def test_two_recordings_of_one_system_are_equal(folders):
    status, lines = told(folders / "first", folders / "again")
    assert status == 0
    assert lines[0] == f"EQUAL: {folders / 'first'} against {folders / 'again'}"
    assert lines[-1] == "the manifests agree"


def test_recordings_of_other_lengths_are_not_comparable_and_say_why(folders):
    status, lines = told(folders / "first", folders / "longer")
    assert status == 3
    assert lines[0].startswith("UNVERIFIED: ")
    assert "the second was recorded with case.steps=3, the case says 2" in "\n".join(lines)


def test_one_changed_digest_is_named_with_what_the_manifests_say(folders, tmp_path):
    from harness.capture.store import read_recording, write_recording

    recording = read_recording(folders / "first")
    key = next(key for key in recording.records if (key.step, key.rank, key.kind) == (1, 1, "grad"))
    recording.records[key] = recording.records[key]._replace(digest="0" * 32)
    manifest = recording.manifest | {"machine": recording.manifest["machine"] | {"torch": "2.14.0"}}
    write_recording(tmp_path / "changed", manifest, recording.records.items())
    status, lines = told(folders / "first", tmp_path / "changed")
    assert status == 1
    assert f"first divergence: step 1, rank 1, grad {key.name}" in lines
    torch = json.dumps(recording.manifest["machine"]["torch"])
    assert lines[-2:] == ["the manifests differ:", f'  machine.torch: {torch} against "2.14.0"']


def test_a_folder_that_is_there_already_is_not_overwritten(folders):
    with pytest.raises(UsageError) as error:
        record(CASE, "eager", CPU, Target(out=folders / "first"), folders / "reports")
    assert str(error.value) == (
        "UsageError: the recording would overwrite something\n"
        "  expected: a folder that does not exist\n"
        f"  found: {folders / 'first'}"
    )


def test_an_unknown_case_is_a_wrong_call():
    assert named_case([CASE], "toy", Changes(steps=5)).steps == 5
    with pytest.raises(UsageError) as error:
        named_case([CASE], "no_such_case", Changes())
    assert str(error.value) == "UsageError: no such case\n  expected: toy\n  found: no_such_case"


def test_the_command_line_ends_with_2_for_a_case_or_a_folder_that_is_not_there(tmp_path, capsys):
    assert main(["record", "no_such_case", "--system", "eager", "--out", str(tmp_path / "out")]) == 2
    assert "no such case" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "there is no such recording" in capsys.readouterr().err


def test_a_damaged_recording_is_not_judged(folders, tmp_path, capsys):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    assert main(["diff", str(folders / "first"), str(tmp_path / "damaged")]) == 3
    assert "RecordingError" in capsys.readouterr().err
