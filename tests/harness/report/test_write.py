from __future__ import annotations

import errno
import os
import re

import pytest

from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.report import json as report_json
from bitproof.harness.report import write


def test_a_run_folder_is_named_by_time_and_a_suffix_of_its_own(tmp_path):
    first, second = (write.prepare_run_dir(tmp_path / "new" / "reports") for _ in range(2))
    assert first != second
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", first.name)
    assert list(first.iterdir()) == []


def test_a_report_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as error:
        write.prepare_run_dir(tmp_path / "file")
    assert str(error.value) == (
        "UsageError: the report folder cannot be written\n"
        "  expected: a folder in which files can be made\n"
        f"  found: {tmp_path / 'file'}: Not a directory\n"
        "  fix: choose another one with --report-dir"
    )


def test_a_plain_latest_folder_is_refused_and_nothing_is_left_behind(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(UsageError) as error:
        write.prepare_run_dir(tmp_path)
    latest = tmp_path / "latest"
    assert str(error.value) == (
        f"UsageError: {latest} is in the way of the link to the newest run\n"
        "  expected: a symbolic link, or nothing\n"
        "  found: a folder\n"
        f"  fix: move {latest} away, or choose another folder with --report-dir"
    )
    assert os.listdir(tmp_path) == ["latest"]


def test_a_run_is_written_in_every_form_and_latest_points_at_the_newest(report, tmp_path):
    for _ in range(2):
        run_dir = write.prepare_run_dir(tmp_path)
        write.write_run(report, run_dir)
        assert sorted(os.listdir(run_dir)) == ["junit.xml", "report.html", "report.json", "report.md", "report.sarif"]
        assert report_json.read(run_dir / "report.json") == report
        assert os.readlink(tmp_path / "latest") == run_dir.name
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_plain_latest_that_appears_during_a_run_is_refused_with_the_report_in_place(report, tmp_path):
    run_dir = write.prepare_run_dir(tmp_path)
    (tmp_path / "latest").write_text("mine")
    with pytest.raises(UsageError, match="is in the way of the link to the newest run"):
        write.write_run(report, run_dir)
    assert sorted(os.listdir(run_dir)) == ["junit.xml", "report.html", "report.json", "report.md", "report.sarif"]
    assert (tmp_path / "latest").read_text() == "mine"


def test_a_dangling_latest_link_is_replaced(report, tmp_path):
    (tmp_path / "latest").symlink_to("gone")
    run_dir = write.prepare_run_dir(tmp_path)
    write.write_run(report, run_dir)
    assert os.readlink(tmp_path / "latest") == run_dir.name


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    write.write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.md"]


def test_a_form_that_cannot_be_made_leaves_no_file_at_all(report, tmp_path, monkeypatch):
    def fail(report):
        raise ValueError("no")

    monkeypatch.setitem(write.FORMATS, "md", ("report.md", fail))
    run_dir = write.prepare_run_dir(tmp_path)
    with pytest.raises(RecordingError) as error:
        write.write_run(report, run_dir)
    assert str(error.value) == (
        f"RecordingError: the report cannot be written\n  found: ValueError: no\n  came from: {run_dir}"
    )
    assert list(run_dir.iterdir()) == []


def test_more_files_are_written_with_the_report(report, tmp_path):
    run_dir = write.prepare_run_dir(tmp_path)
    write.write_run(report, run_dir, {"more.json": "{}\n"})
    assert sorted(os.listdir(run_dir)) == [
        "junit.xml",
        "more.json",
        "report.html",
        "report.json",
        "report.md",
        "report.sarif",
    ]


@pytest.mark.parametrize("num_calls", [0, 2, 5, 6])
def test_a_run_folder_that_runs_full_at_any_file_holds_none_of_them(report, tmp_path, monkeypatch, num_calls):
    calls = []

    def replace(source, target, original=os.replace):
        calls.append(target)
        if len(calls) > num_calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(source, target)

    run_dir = write.prepare_run_dir(tmp_path)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(RecordingError, match="the report cannot be written\n  found: No space left on device"):
        write.write_run(report, run_dir)
    assert (os.listdir(run_dir), os.listdir(tmp_path)) == ([], [run_dir.name])


def test_latest_is_left_as_it_was_where_no_link_can_be_made(report, tmp_path, monkeypatch):
    def refuse(self, target, target_is_directory=False):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    run_dir = write.prepare_run_dir(tmp_path)
    monkeypatch.setattr("pathlib.Path.symlink_to", refuse)
    with pytest.raises(RecordingError) as error:
        write.write_run(report, run_dir)
    assert str(error.value) == (
        f"RecordingError: the report is written, and {tmp_path / 'latest'} cannot be pointed at it\n"
        f"  found: Operation not permitted\n  came from: {run_dir}"
    )
    assert report_json.read(run_dir / "report.json") == report


def test_finishing_shows_where_the_report_is_or_why_it_is_not(report, tmp_path, monkeypatch, capsys):
    run_dir = write.prepare_run_dir(tmp_path)
    assert write.finish_run(report, run_dir, 1) == 1
    assert capsys.readouterr() == (f"report: {run_dir / 'report.md'}\n", "")
    monkeypatch.setitem(write.FORMATS, "md", ("report.md", lambda report: {}["no"]))
    run_dir = write.prepare_run_dir(tmp_path)
    assert [write.finish_run(report, run_dir, status) for status in (0, 1, 2)] == [3, 3, 2]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("RecordingError: the report cannot be written\n  found: KeyError: 'no'\n")


def test_a_folder_that_holds_empty_logs_alone_is_discarded(tmp_path):
    for name, content in (("bare", ""), ("told", "it broke")):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "host.log").write_text(content)
        write.discard_if_bare(tmp_path / name)
    assert os.listdir(tmp_path) == ["told"]


def test_an_unknown_format_is_refused_with_those_that_exist(report):
    with pytest.raises(UsageError) as error:
        write.render_as(report, "pdf")
    assert error.value.expected == "annotations or comment or html or json or junit or md or sarif"
    assert error.value.found == "'pdf'"
