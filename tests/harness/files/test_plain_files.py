from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from bitproof.harness.files import plain_files
from bitproof.harness.files.plain_files import check_plain, read_plain


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def of_a_socket(path: Path) -> Path:
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    return path


def link(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


STRANGE = {
    "a pipe": pipe,
    "a socket": of_a_socket,
    "a folder": lambda path: path.mkdir() or path,
    "zeros": lambda path: link(path, "/dev/zero"),
    "a terminal": lambda path: link(path, "/dev/tty") if os.path.exists("/dev/tty") else link(path, "/dev/zero"),
    "the standard input": lambda path: link(path, "/dev/stdin"),
    "a link to itself": lambda path: link(path, str(path)),
    "nothing": lambda path: path,
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(os.getcwd())


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind) -> None:
    path = STRANGE[kind](tmp_path / "strange")
    reader, writer = os.pipe()  # as standard input under pytest may be a file
    kept = os.dup(0)
    os.dup2(reader, 0)
    try:
        for look in (read_plain, check_plain):
            with pytest.raises(OSError) as refused:
                look(path)
            assert refused.value.strerror
    finally:
        os.dup2(kept, 0)
        for descriptor in (reader, writer, kept):
            os.close(descriptor)


def test_a_file_is_read_up_to_its_bound(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    assert read_plain(tmp_path / "file", 10) == b"x" * 10
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_plain(tmp_path / "file", 9)


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="a file of Linux")
def test_a_file_that_says_it_is_empty_and_never_ends_is_read_up_to_the_bound() -> None:
    assert os.stat("/proc/self/pagemap").st_size == 0
    with pytest.raises(OSError):
        read_plain("/proc/self/pagemap", 1 << 22)


def test_a_file_that_becomes_a_pipe_after_the_first_look_is_refused(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_text("{}")
    looked = plain_files.check_plain

    def replaced(*arguments) -> None:
        looked(*arguments)
        path.unlink()
        os.mkfifo(path)

    monkeypatch.setattr(plain_files, "check_plain", replaced)
    with pytest.raises(OSError, match="it is a pipe, not a regular file"):
        read_plain(path)


def test_a_file_that_grows_while_it_is_read_ends_at_the_bound(tmp_path) -> None:
    path, is_over = tmp_path / "file", threading.Event()
    path.write_bytes(b"x" * 100)

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not is_over.is_set() and path.stat().st_size < 1 << 28:
                file.write(b"x" * (1 << 16))

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        with pytest.raises(OSError, match="more than"):
            while True:
                read_plain(path, 1 << 20)
    finally:
        is_over.set()
        writer.join()


@pytest.mark.parametrize("name", ["a\0b", "n" * 5000, ""])
def test_what_is_no_name_of_a_file_is_refused_as_an_oserror(name) -> None:
    with pytest.raises(OSError):
        read_plain(name)
