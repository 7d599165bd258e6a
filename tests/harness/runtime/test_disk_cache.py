"""What is kept on disk is used when it is whole, asked for by its very key, and nobody else could have written it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bitproof.harness.runtime import disk_cache
from bitproof.harness.runtime.disk_cache import default_folder, keep, read_cached

KEY = '{"case": "a"}'
VALUE = {"nodes": [1, 2.5, None, "x"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "bitproof"


def only_file(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def test_what_was_kept_is_read_under_its_key_and_kind_and_under_no_other(folder: Path) -> None:
    assert read_cached(folder, "graph", KEY) is None, "there is no folder yet"
    assert keep(folder, "graph", KEY, VALUE)
    assert read_cached(folder, "graph", KEY) == VALUE
    assert read_cached(folder, "graph", KEY + " ") is None
    assert read_cached(folder, "other", KEY) is None
    assert only_file(folder).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", [0, 31, 32, 40, -1])
def test_a_flipped_bit_anywhere_makes_it_unread(place: int, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(folder, "graph", KEY, VALUE)
    file = only_file(folder)
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert read_cached(folder, "graph", KEY) is None
    assert caplog.messages == [f"{file} is not used: its hash is not that of its content"]
    assert keep(folder, "graph", KEY, VALUE) and read_cached(folder, "graph", KEY) == VALUE, "and it is written anew"


def test_a_file_that_was_kept_under_another_key_is_not_used_under_its_name(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(folder, "graph", KEY, VALUE)
    file = only_file(folder)
    keep(folder, "graph", "another", "forged")
    [other] = set(folder.iterdir()) - {file}
    other.replace(file)
    assert read_cached(folder, "graph", KEY) is None
    assert caplog.messages == [f"{file} is not used: it was kept under another key"]


@pytest.mark.parametrize("content", [b"", b"x" * 32, b"x" * 500])
def test_what_is_cut_short_or_strange_is_not_used(content: bytes, folder: Path) -> None:
    keep(folder, "graph", KEY, VALUE)
    only_file(folder).write_bytes(content)
    assert read_cached(folder, "graph", KEY) is None


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_nothing_is_read_from_and_nothing_kept_in_a_folder_that_others_may_write(
    mode: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(folder, "graph", KEY, VALUE)
    folder.chmod(mode)
    assert read_cached(folder, "graph", KEY) is None
    assert not keep(folder, "graph", "another", VALUE)
    assert caplog.messages == [f"nothing is kept in {folder}: it is no folder of this user's alone"] * 2
    folder.chmod(0o755)
    assert read_cached(folder, "graph", KEY) == VALUE, "to be read by others harms nothing"


def test_a_file_that_others_may_write_is_not_used(folder: Path) -> None:
    keep(folder, "graph", KEY, VALUE)
    only_file(folder).chmod(0o660)
    assert read_cached(folder, "graph", KEY) is None


def test_a_link_to_a_folder_is_no_folder_of_ones_own(folder: Path, tmp_path: Path) -> None:
    keep(folder, "graph", KEY, VALUE)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert read_cached(link, "graph", KEY) is None and not keep(link, "graph", "another", VALUE)


def test_another_users_folder_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(folder, "graph", KEY, VALUE)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert read_cached(folder, "graph", KEY) is None


def test_what_cannot_be_written_is_not_kept_and_leaves_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not keep(folder, "graph", KEY, object())
    assert "was not kept: Object of type object is not JSON serializable" in caplog.messages[0]
    assert list(folder.iterdir()) == []
    folder.rmdir()
    folder.write_text("a file stands where the folder should")
    assert not keep(folder, "graph", KEY, VALUE) and read_cached(folder, "graph", KEY) is None


def test_what_was_used_longest_ago_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_FILES", 2)
    now = time.time()
    for age, key in ((300, "old"), (200, "older but read"), (0, "new")):
        keep(folder, "graph", key, key)
        for file in folder.iterdir():
            if read_without_touch(file, key):
                os.utime(file, (now - age, now - age))
        read_cached(folder, "graph", "older but read")
    assert [read_cached(folder, "graph", key) for key in ("old", "older but read", "new")] == [
        None,
        "older but read",
        "new",
    ]


def test_a_file_that_another_process_removes_meanwhile_is_no_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(folder, "graph", "other", VALUE)
    listed = os.scandir

    @contextlib.contextmanager
    def then_removed(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        with listed(path) as found:
            entries = list(found)
        for entry in entries:
            os.unlink(entry.path)
        yield entries

    monkeypatch.setattr(os, "scandir", then_removed)
    assert keep(folder, "graph", KEY, VALUE) and not caplog.messages


def test_only_our_own_plain_files_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep(folder, "graph", KEY, VALUE)
    ours = only_file(folder)
    theirs = ["thesis.tex", "graph-" + "0" * 64, ours.name + ".bak", "bitproof-notes", ".bitproof", ours.name[:-1]]
    for name in theirs:
        (folder / name).write_text("not to be lost")
        os.utime(folder / name, (0, 0))
    target = tmp_path / "elsewhere"
    target.write_text("not to be lost")
    strange = {kind: folder / f"bitproof-graph-{place:064x}" for place, kind in enumerate(("fifo", "folder", "link"))}
    os.mkfifo(strange["fifo"])
    strange["folder"].mkdir()
    strange["link"].symlink_to(target)
    killed = folder / ".bitproof-partial-abc_123"
    killed.write_text("half")
    os.utime(killed, (1, 1))
    for limit in ("MAX_FILES", "MAX_BYTES"):
        monkeypatch.setattr(disk_cache, limit, 0)
        keep(folder, "graph", "another", VALUE)
        names = sorted(entry.name for entry in folder.iterdir())
        assert names == sorted([*theirs, *(path.name for path in strange.values())]), limit
    assert target.read_text() == "not to be lost"


def _socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(file.parent, os.O_RDONLY)
        try:  # a socket's path is short
            bound.bind(f"/proc/self/fd/{here}/{file.name}")
        finally:
            os.close(here)


def _bomb(file: Path, of: bytes = b" ") -> None:
    """A small file that is whole, and says more than a machine has memory for."""
    packing = zlib.compressobj(9)
    packed = b"".join([*(packing.compress(of * (1 << 20)) for _ in range(1 << 10)), packing.flush()])
    file.write_bytes(hashlib.sha256(packed).digest() + packed)
    file.chmod(0o600)


def _huge(file: Path) -> None:
    file.touch(0o600)
    os.truncate(file, 1 << 40)


def _cut(file: Path) -> None:
    packed = zlib.compress(json.dumps({"key": KEY, "value": VALUE}).encode())[:-3]
    file.write_bytes(hashlib.sha256(packed).digest() + packed)
    file.chmod(0o600)


def _nested(file: Path) -> None:
    packed = zlib.compress(b"[" * 1_000_000)
    file.write_bytes(hashlib.sha256(packed).digest() + packed)
    file.chmod(0o600)


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (os.mkfifo, "it is a FIFO"),
    "a socket": (_socket, "it is a socket"),
    "a folder": (Path.mkdir, "it is a folder"),
    "a link to a device": (lambda file: file.symlink_to("/dev/zero"), "it is a symbolic link"),
    "a link to itself": (lambda file: file.symlink_to(file), "it is a symbolic link"),
    "a bomb": (_bomb, "takes more than 67,108,864 bytes"),
    "a bomb of zeros": (lambda file: _bomb(file, b"\0"), "takes more than 67,108,864 bytes"),
    "a huge file": (_huge, "it is larger than all that is kept: 1,099,511,627,776 bytes"),
    "a cut stream": (_cut, "its content is cut short"),
    "deep nesting": (_nested, "while decoding a JSON array"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_file_of_ours_or_too_large_is_passed_over_quickly_and_said(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, why = STRANGE[name]
    keep(folder, "graph", KEY, VALUE)
    file = only_file(folder)
    file.unlink()
    make(file)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert read_cached(folder, "graph", KEY) is None
    assert time.process_time() - began < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10, "KiB"
    [message] = caplog.messages
    assert message.startswith(f"{file} is not used: ") and why in message


@pytest.mark.parametrize("name", ["a FIFO", "a socket", "a folder", "a link to a device"])
def test_what_is_no_plain_file_is_not_replaced(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, why = STRANGE[name]
    keep(folder, "graph", KEY, VALUE)
    file = only_file(folder)
    file.unlink()
    make(file)
    assert not keep(folder, "graph", KEY, VALUE)
    assert caplog.messages == [f"{file} was not kept: {why}"] and [*folder.iterdir()] == [file]


def test_what_could_not_be_read_again_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_CONTENT", 20)
    assert not keep(folder, "graph", KEY, VALUE)


def read_without_touch(file: Path, key: str) -> bool:
    return file == disk_cache._file(file.parent, "graph", key)


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
