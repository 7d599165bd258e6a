from __future__ import annotations

import os
import re

import pytest

from harness.errors import UsageError
from harness.report import json as report_json
from harness.report import write


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
        assert sorted(os.listdir(run_dir)) == ["junit.xml", "report.html", "report.json", "report.md"]
        assert report_json.read(run_dir / "report.json") == report
        assert os.readlink(tmp_path / "latest") == run_dir.name
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_plain_latest_that_appears_during_a_run_is_refused_with_the_report_in_place(report, tmp_path):
    run_dir = write.prepare_run_dir(tmp_path)
    (tmp_path / "latest").write_text("mine")
    with pytest.raises(UsageError, match="is in the way of the link to the newest run"):
        write.write_run(report, run_dir)
    assert sorted(os.listdir(run_dir)) == ["junit.xml", "report.html", "report.json", "report.md"]
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
    with pytest.raises(ValueError, match="no"):
        write.write_run(report, run_dir)
    assert list(run_dir.iterdir()) == []


def test_an_unknown_format_is_refused_with_those_that_exist(report):
    with pytest.raises(UsageError) as error:
        write.render_as(report, "pdf")
    assert str(error.value) == (
        "UsageError: there is no such report format\n  expected: html or json or junit or md\n  found: 'pdf'"
    )


@pytest.mark.parametrize(
    ("environment", "reports"),
    [
        ({}, True),
        ({"RANK": "3", "WORLD_SIZE": "8"}, True),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "8"}, True),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "8"}, False),
    ],
)
def test_under_torchrun_only_rank_0_reports(environment, reports):
    assert write.is_reporting_rank(environment) is reports
