"""What is kept on disk is used when it is whole, asked for by its very key, and nobody else could have written it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from harness.program import kept
from harness.program.kept import default_folder, keep, read_kept

KEY = '{"case": "a"}'
VALUE = {"nodes": [1, 2.5, None, "x"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "bitproof"


def only_file(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def test_what_was_kept_is_read_under_its_key_and_kind_and_under_no_other(folder: Path) -> None:
    assert read_kept(folder, "graph", KEY) is None, "there is no folder yet"
    assert keep(folder, "graph", KEY, VALUE)
    assert read_kept(folder, "graph", KEY) == VALUE
    assert read_kept(folder, "graph", KEY + " ") is None
    assert read_kept(folder, "other", KEY) is None
    assert only_file(folder).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", [0, 31, 32, 40, -1])
def test_a_flipped_bit_anywhere_makes_it_unread(place: int, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(folder, "graph", KEY, VALUE)
    file = only_file(folder)
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert read_kept(folder, "graph", KEY) is None
    assert caplog.messages == [f"{file} is not used: its hash is not that of its content"]
    assert keep(folder, "graph", KEY, VALUE) and read_kept(folder, "graph", KEY) == VALUE, "and it is written anew"


def test_a_file_that_was_kept_under_another_key_is_not_used_under_its_name(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(folder, "graph", KEY, VALUE)
    file = only_file(folder)
    keep(folder, "graph", "another", "forged")
    [other] = set(folder.iterdir()) - {file}
    other.replace(file)
    assert read_kept(folder, "graph", KEY) is None
    assert caplog.messages == [f"{file} is not used: it was kept under another key"]


@pytest.mark.parametrize("content", [b"", b"x" * 32, b"x" * 500])
def test_what_is_cut_short_or_strange_is_not_used(content: bytes, folder: Path) -> None:
    keep(folder, "graph", KEY, VALUE)
    only_file(folder).write_bytes(content)
    assert read_kept(folder, "graph", KEY) is None


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_nothing_is_read_from_and_nothing_kept_in_a_folder_that_others_may_write(
    mode: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(folder, "graph", KEY, VALUE)
    folder.chmod(mode)
    assert read_kept(folder, "graph", KEY) is None
    assert not keep(folder, "graph", "another", VALUE)
    assert caplog.messages == [f"nothing is kept in {folder}: it is no folder of this user's alone"] * 2
    folder.chmod(0o755)
    assert read_kept(folder, "graph", KEY) == VALUE, "to be read by others harms nothing"


def test_a_file_that_others_may_write_is_not_used(folder: Path) -> None:
    keep(folder, "graph", KEY, VALUE)
    only_file(folder).chmod(0o660)
    assert read_kept(folder, "graph", KEY) is None


def test_a_link_to_a_folder_is_no_folder_of_ones_own(folder: Path, tmp_path: Path) -> None:
    keep(folder, "graph", KEY, VALUE)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert read_kept(link, "graph", KEY) is None and not keep(link, "graph", "another", VALUE)


def test_another_users_folder_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(folder, "graph", KEY, VALUE)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert read_kept(folder, "graph", KEY) is None


def test_what_cannot_be_written_is_not_kept_and_leaves_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not keep(folder, "graph", KEY, object())
    assert "was not kept: Object of type object is not JSON serializable" in caplog.messages[0]
    assert list(folder.iterdir()) == []
    folder.rmdir()
    folder.write_text("a file stands where the folder should")
    assert not keep(folder, "graph", KEY, VALUE) and read_kept(folder, "graph", KEY) is None


def test_what_was_used_longest_ago_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_FILES", 2)
    now = time.time()
    for age, key in ((300, "old"), (200, "older but read"), (0, "new")):
        keep(folder, "graph", key, key)
        for file in folder.iterdir():
            if read_without_touch(file, key):
                os.utime(file, (now - age, now - age))
        read_kept(folder, "graph", "older but read")
    assert [read_kept(folder, "graph", key) for key in ("old", "older but read", "new")] == [
        None,
        "older but read",
        "new",
    ]


def read_without_touch(file: Path, key: str) -> bool:
    return file == kept._file(file.parent, "graph", key)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"BITPROOF_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/bitproof")),
        ({"HOME": "/h"}, Path("/h/.cache/bitproof")),
    ],
)
def test_the_folder_is_the_one_that_the_environment_names_else_in_the_users_cache(
    environment: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BITPROOF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_folder() == expected


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BITPROOF_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert default_folder() is None
