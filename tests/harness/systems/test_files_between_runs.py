"""Files that an earlier run of a comparison wrote: a later run may write them anew, and may not depend on them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from bitproof.harness.errors import UsageError
from bitproof.harness.systems.files_between_runs import RunFiles
from bitproof.harness.within_user_code import refusals_raised

BY_ITSELF = ctypes.CDLL(None)
"""A library that opens files without Python."""


def read_by_library(path):
    descriptor = BY_ITSELF.open(os.fsencode(path), os.O_RDONLY)
    if descriptor >= 0:
        BY_ITSELF.read(descriptor, ctypes.create_string_buffer(9), 9)
        BY_ITSELF.close(descriptor)


def rename_and_read(path):
    if os.path.exists(path):
        os.rename(path, "other")
        Path("other").read_text()


def append_and_read(path):
    with open(path, "a") as file:
        file.write("x")
    Path(path).read_text()


def lock(path):
    """Open a lock's file as the library filelock does."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        os.close(os.open(path, os.O_RDWR))


def swallow(path):
    with contextlib.suppress(Exception):
        Path(path).read_text()


def write(path):
    Path(path).write_text("x")


def write_and_date_back(path):
    write(path)
    os.utime(path, (1e9, 1e9))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of a script that does this, in a working directory that all runs share."""
    here, number = tmp_path / "here", 0
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def run(*actions):
        nonlocal number
        number += 1
        time.sleep(0.02)  # the file system's clock has steps
        files = RunFiles("train.py", "case", tmp_path / "work" / f"run{number}", [here], [here / "reports"])
        with refusals_raised(), files:
            for action in actions:
                action()
        shutil.rmtree(tmp_path / "work" / f"run{number}")
        time.sleep(0.02)
        return files

    return run


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        (lambda: open("a").close(), "the script train.py reads a"),
        (lambda: os.close(os.open("a", os.O_RDONLY)), "the script train.py reads a"),
        (lambda: swallow("a"), "the script train.py reads a"),
        (lambda: append_and_read("a"), "the script train.py reads a"),
        (lambda: rename_and_read("a"), "the script train.py reads other"),
        (lambda: sqlite3.connect("a").close(), "the script train.py reads a"),
        (lambda: subprocess.run("cat *", shell=True, capture_output=True), "a program that it ran, reads "),
        (lambda: subprocess.run(["sh", "-c", "read x < a"]), "a program that it ran, reads "),
        (lambda: read_by_library("a"), "a program that it ran, reads "),
        (lambda: os.path.exists("a"), "the script train.py looks at "),
        (lambda: Path("a").is_file(), "the script train.py looks at "),
        (lambda: os.access("a", os.R_OK), "the script train.py looks at "),
        (lambda: os.system("test -f a"), "the script train.py looks at "),
    ],
)
@pytest.mark.parametrize(
    "writes", [lambda: write("a"), lambda: write_and_date_back("a"), lambda: os.system("echo x > a")]
)
def test_a_run_that_depends_on_a_file_of_an_earlier_run_is_refused_however_it_reads(run, writes, reads, said):
    run(writes)
    with pytest.raises(UsageError) as refusal:
        run(reads)
    assert said in refusal.value.what and "which an earlier run of this comparison wrote" in refusal.value.what


@pytest.mark.parametrize(
    "does",
    [
        lambda: (write("a"), Path("a").read_text()),
        lambda: shutil.copy(__file__, "a"),
        lambda: open("a", "a").close(),
        lambda: (os.path.exists("a") and os.remove("a"), write("a"), Path("a").read_text()),
        lambda: subprocess.run("echo x > a; cat a", shell=True, capture_output=True),
        lambda: (write("new"), os.replace("new", "a"), Path("a").read_text()),
        lambda: os.makedirs("folder", exist_ok=True),
        lambda: os.close(os.open("a.lock", os.O_RDWR | os.O_CREAT)),
        lambda: lock("a.lock"),
    ],
)
def test_a_run_that_writes_a_file_anew_depends_on_none(run, does):
    for _ in range(3):
        run(does)


def test_a_file_from_before_the_comparison_is_read_freely(run):
    write("a")
    time.sleep(0.02)
    for _ in range(2):
        run(lambda: Path("a").read_text(), lambda: subprocess.run(["cat", "a"], capture_output=True))


@pytest.mark.parametrize(
    "rewrites",
    [
        lambda: write("a"),
        lambda: shutil.copy("b", "a"),
        lambda: (write("new"), os.replace("new", "a")),
        lambda: (os.remove("a"), write("a")),
        lambda: (Path("a").write_text("y"), write("a")),
        lambda: os.close(os.open("a", os.O_RDWR)),
        lambda: Path("a").touch(),
        lambda: os.chmod("a", os.stat("a").st_mode),
        lambda: write_and_date_back("a"),
    ],
)
def test_a_file_that_has_the_content_of_before_the_comparison_is_read_freely(run, rewrites):
    write("a"), write("b")
    time.sleep(0.02)
    for _ in range(3):
        run(rewrites, lambda: Path("a").read_text())
        run(lambda: Path("a").read_text(), lambda: os.path.exists("a"), lambda: subprocess.run(["cat", "a"]))


@pytest.mark.parametrize(
    "writes",
    [
        lambda: Path("a").write_text("y"),
        lambda: (write("a"), append_and_read("a")),
        lambda: (os.system("echo y > a"), Path("a").write_text("y")),
        lambda: (Path("new").write_text("y"), os.replace("new", "a")),
        lambda: os.chmod("a", 0o600),
    ],
)
def test_a_file_that_has_another_content_than_before_the_comparison_is_an_earlier_runs(run, writes):
    write("a")
    time.sleep(0.02)
    run(writes)
    with pytest.raises(UsageError, match="which an earlier run of this comparison wrote"):
        run(lambda: Path("a").read_text())


def test_a_file_from_before_that_every_run_writes_anew_is_no_dependency(run):
    write("a")
    run(lambda: Path("a").write_text("of run x"))
    run(lambda: Path("a").write_text("of run y"))
    run(lambda: Path("a").write_text("of run z"))


def test_ranks_that_look_into_a_file_of_before_do_not_see_each_other(run, tmp_path):
    write("a")
    run(lambda: Path("a").write_text("of run x"))
    time.sleep(0.02)
    ranks = [RunFiles("train.py", "case", tmp_path / "work" / "run2", [Path.cwd()]) for _ in range(2)]
    with refusals_raised(), ranks[0]:
        Path("a").write_text("of run y")
    with refusals_raised(), ranks[1]:
        pass


def test_a_file_that_python_made_elsewhere_is_watched_there(run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    run(elsewhere.mkdir, lambda: BY_ITSELF.creat(os.fsencode(elsewhere / "a"), 0o600))
    with pytest.raises(UsageError, match="a program that it ran, reads"):
        run(lambda: subprocess.run(f"cat {elsewhere}/*", shell=True))


def test_each_run_has_temporary_files_and_a_folder_for_output_of_its_own(run):
    seen = []

    def begin():
        for folder in (tempfile.gettempdir(), os.environ["TMPDIR"]):
            seen.append((folder, os.listdir(folder)))
        write(f"{tempfile.gettempdir()}/a")

    outs = [run(begin).out for _ in range(2)]
    assert [names for _, names in seen] == [[]] * 4 and len({folder for folder, _ in seen}) == 2
    assert outs[0] != outs[1]


def test_reports_and_files_of_another_case_are_not_watched(run, tmp_path):
    run(lambda: (os.mkdir("reports"), write("reports/log"), write("a")))
    run(lambda: Path("reports/log").read_text())
    time.sleep(0.02)
    other = RunFiles("train.py", "other", tmp_path / "work" / "other-run", [Path.cwd()])
    with refusals_raised(), other:
        Path("a").read_text()


def test_copying_attributes_works_while_questions_are_noted(run):
    write("a")
    run(lambda: shutil.copy2("a", "b", follow_symlinks=False), lambda: shutil.copytree(".", "../copy"))
