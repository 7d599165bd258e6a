"""Temporary folders: a killed command's is removed by the next one, and nobody else's ever is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bitproof.harness.runtime import work_folder
from bitproof.harness.runtime.work_folder import make_work_folder, remove_work_folder

MARKER = ".bitproof-made-this"
pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[3]
HOLDER = """
import sys
from bitproof.harness.runtime.work_folder import make_work_folder
made = make_work_folder()
(made / "part").write_text("left")
print(made, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder(temporary):
    """A process that has a folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, Path(process.stdout.readline().strip())


def test_a_killed_commands_folder_is_removed_by_the_next_and_a_living_ones_is_not(temporary):
    living, kept = holder(temporary)
    dead, left = holder(temporary)
    try:
        dead.kill()
        dead.wait()
        assert (left / "part").exists()
        own = make_work_folder()
        assert not left.exists()
        assert (kept / "part").exists()
        another = make_work_folder()
        assert own.exists(), "of two in one process neither removes the other's"
        remove_work_folder(own)
        remove_work_folder(another)
        assert [path.name for path in temporary.iterdir()] == [kept.name]
    finally:
        living.kill()
        for process in (living, dead):
            process.communicate()
        assert living.returncode


def test_what_is_not_a_dead_commands_stays(temporary):
    theirs = temporary / "theirs"
    theirs.mkdir()
    (theirs / MARKER).write_text("")
    (temporary / "bitproof-linked_1").symlink_to(theirs)
    for name in ("bitproof-notes", "bitproof-inductor-abcdefgh", "bitproof-unlocked", "thesis", "bitproof-testvenv"):
        (temporary / name).mkdir()
        (temporary / name / "text").write_text("mine")
        for lock in (".lock", MARKER):
            (temporary / name / lock).write_text("")
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to(theirs / MARKER), Path.mkdir)):
        folder = temporary / f"bitproof-strange{number}"
        folder.mkdir()
        make(folder / MARKER)
    (temporary / "bitproof-afile__1").write_text("no folder")
    before = sorted(temporary.rglob("*"))
    remove_work_folder(make_work_folder())
    assert sorted(temporary.rglob("*")) == before


def left(temporary, **changes):
    """A folder as a dead command leaves it, with changes of its marker."""
    before = {*temporary.iterdir()}
    if not (pid := os.fork()):
        (make_work_folder() / "text").write_text("left")
        os._exit(0)
    os.waitpid(pid, 0)
    [made] = {*temporary.iterdir()} - before
    marker = json.loads((made / MARKER).read_text()) | changes
    (made / MARKER).write_text(json.dumps(marker))
    return made


def test_a_dead_commands_folder_is_removed(temporary):
    made = left(temporary)
    remove_work_folder(make_work_folder())
    assert not made.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"host": "another"},
        {"boot": "0b7c9a52-5f0e-4a0e-9d0e-000000000000"},
        {"folder": "bitproof-12345678"},
        {"inode": 1},
        {"made_by": "somebody"},
        {"boot": None},
        {"inode": "1"},
    ],
    ids=str,
)
def test_a_folder_of_another_machine_boot_or_maker_stays(temporary, change):
    made = left(temporary, **change)
    remove_work_folder(make_work_folder())
    assert (made / "text").exists()


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 5000, '{"made_by": 1}', "\x00\xff"])
def test_a_marker_that_says_nothing_marks_nothing(temporary, text):
    made = left(temporary)
    (made / MARKER).write_text(text)
    remove_work_folder(make_work_folder())
    assert (made / "text").exists()


def test_a_copy_a_renamed_folder_and_a_linked_marker_stay(temporary):
    made = left(temporary)
    copy, moved, linked = (temporary / f"bitproof-{name}" for name in ("backup_1", "renamed1", "linked_1"))
    shutil.copytree(made, copy)
    made.rename(moved)
    linked.mkdir()
    os.link(moved / MARKER, linked / MARKER)
    remove_work_folder(make_work_folder())
    assert all((folder / MARKER).exists() for folder in (copy, moved, linked))


def test_a_machine_that_shows_no_boot_removes_nothing_and_marks_nothing(temporary, monkeypatch):
    made = left(temporary)
    monkeypatch.setattr(work_folder, "BOOT", temporary / "absent")
    own = make_work_folder()
    assert made.exists() and not (own / MARKER).exists()
    remove_work_folder(own)


def test_so_does_a_machine_whose_boot_has_an_empty_name(temporary, monkeypatch):
    (temporary / "boot_id").write_text("\n")
    monkeypatch.setattr(work_folder, "BOOT", temporary / "boot_id")
    own = make_work_folder()
    assert not (own / MARKER).exists()
    remove_work_folder(own)


def test_another_users_folder_stays(temporary, monkeypatch):
    folder = left(temporary)
    real = os.getuid()
    monkeypatch.setattr(work_folder.os, "getuid", lambda: real + 1)
    remove_work_folder(make_work_folder())
    assert folder.exists()
