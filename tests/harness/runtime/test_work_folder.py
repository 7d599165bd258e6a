"""Temporary folders: a killed command's is removed by the next one, and nobody else's ever is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitproof.harness.runtime import work_folder
from bitproof.harness.runtime.work_folder import make_work_folder, remove_work_folder

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


@pytest.mark.ranks
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
    (theirs / ".lock").write_text("")
    (temporary / "bitproof-linked_1").symlink_to(theirs)
    for name in ("bitproof-notes", "bitproof-inductor-abcdefgh", "bitproof-unlocked", "thesis"):
        (temporary / name).mkdir()
        (temporary / name / "text").write_text("mine")
    (temporary / "bitproof-notes" / ".lock").write_text("")
    (temporary / "bitproof-inductor-abcdefgh" / ".lock").write_text("")
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to(theirs / ".lock"), Path.mkdir)):
        folder = temporary / f"bitproof-strange{number}"
        folder.mkdir()
        make(folder / ".lock")
    (temporary / "bitproof-afile__1").write_text("no folder")
    before = sorted(temporary.rglob("*"))
    remove_work_folder(make_work_folder())
    assert sorted(temporary.rglob("*")) == before
    (temporary / "bitproof-unlocked" / ".lock").write_text("")
    remove_work_folder(make_work_folder())
    assert not (temporary / "bitproof-unlocked").exists(), "with a lock that nobody holds it is a dead one's"


def test_another_users_folder_stays(temporary, monkeypatch):
    folder = temporary / "bitproof-abcd1234"
    folder.mkdir()
    (folder / ".lock").write_text("")
    real = os.getuid()
    monkeypatch.setattr(work_folder.os, "getuid", lambda: real + 1)
    remove_work_folder(make_work_folder())
    assert folder.exists()
