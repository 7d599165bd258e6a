from __future__ import annotations

import os
import socket

import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.merge.copying import CopyCapacity, copy_file, copy_folder, opened_folder


def copy(source, target, room=None):
    with opened_folder(source.parent) as parent:
        copy_folder(parent, source.name, target, room or CopyCapacity())


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "source" / "inner" / "file").write_bytes(b"x" * 3_000_000)
    (tmp_path / "source" / "empty").write_bytes(b"")
    return tmp_path / "source"


def files_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def test_regular_files_are_copied_whole(source, tmp_path):
    copy(source, tmp_path / "target")
    assert files_of(tmp_path / "target") == ["empty", "inner/file"]
    assert (tmp_path / "target" / "inner" / "file").read_bytes() == b"x" * 3_000_000


def test_what_is_no_regular_file_is_left_out(source, tmp_path, monkeypatch):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    (source / "file_link").symlink_to(tmp_path / "secret" / "key")
    (source / "folder_link").symlink_to(tmp_path / "secret")
    (source / "loop").symlink_to("loop")
    os.mkfifo(source / "pipe")
    monkeypatch.chdir(source)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        copy(source, tmp_path / "target")
    assert files_of(tmp_path / "target") == ["empty", "inner/file"]


def test_a_folder_that_is_a_link_or_a_file_is_not_opened(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    for path in (tmp_path / "link", tmp_path / "missing", source / "empty"):
        with opened_folder(path) as found:
            assert found is None
    with opened_folder(tmp_path) as parent:
        copy_folder(parent, "link", tmp_path / "target", CopyCapacity())
        copy_file(parent, "source", tmp_path / "target", CopyCapacity())
    assert not (tmp_path / "target").exists()


def test_more_than_there_is_room_for_is_refused_before_it_is_copied(source, tmp_path):
    with pytest.raises(RecordingError) as error:
        copy(source, tmp_path / "target", CopyCapacity(num_bytes=2_999_999))
    assert str(error.value) == (
        "RecordingError: a shard's files are too large to copy\n"
        "  expected: 64 GiB and 1,000,000 files at most\n"
        f"  found: more, at {tmp_path / 'target' / 'inner' / 'file'}\n"
        "  fix: leave out what is not a run's, or merge folders that hold nothing but report.json"
    )
    assert files_of(tmp_path / "target") == ["empty"]
    copy(source, tmp_path / "fits", CopyCapacity(num_bytes=3_000_000, entries=4))
    with pytest.raises(RecordingError):
        copy(source, tmp_path / "fits_not", CopyCapacity(entries=3))
