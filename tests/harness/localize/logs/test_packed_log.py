"""A baseline's log of calls is a zip file that somebody else may have made."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path

import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.localize.logs import replay
from bitproof.harness.localize.logs.replay import CALLS, packed_calls, read_log, read_records, read_steps, read_types

CALL = json.dumps([["layers.0", "forward", None], "aten.mul", ["a" * 32], ["b" * 32]]).encode()
DIRECTORY, METHOD, FLAGS, VERSION, SIZE = b"PK\1\2", 10, 8, 6, 24
"""The signature of an entry of the directory, and where the entry has what."""


def packed(path: Path, content: bytes = CALL, method: int = zipfile.ZIP_DEFLATED, member: str = CALLS) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content, method)
    return path


def forged(path: Path, offset: int, value: bytes) -> Path:
    """The archive with an entry that states something else."""
    content = bytearray(packed(path).read_bytes())
    at = content.find(DIRECTORY) + offset
    content[at : at + len(value)] = value
    path.write_bytes(content)
    return path


def refused(path: Path) -> str:
    with pytest.raises(RecordingError) as error:
        read_log(path)
    return str(error.value)


def test_a_log_that_was_packed_for_a_baseline_is_read(tmp_path: Path) -> None:
    (tmp_path / "kept.zip").write_bytes(packed_calls(packed(tmp_path / "rank0.zip", method=zipfile.ZIP_STORED)))
    assert [call.operator for call in read_log(tmp_path / "kept.zip")] == ["aten.mul"]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"9" * 5_000, b"null", b"[[], 1, [], []]"])
def test_a_log_that_is_no_text_or_nested_without_end_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "a log of operator calls is damaged" in refused(packed(tmp_path / "rank0.zip", content))


@pytest.mark.parametrize(
    ("offset", "value"),
    [(METHOD, b"\x63"), (METHOD, b"\x0c"), (METHOD, b"\x0e"), (FLAGS, b"\x01"), (VERSION, b"\x63"), (SIZE, b"\xff")],
)
def test_an_archive_of_another_kind_is_refused(tmp_path: Path, offset: int, value: bytes) -> None:
    """An unknown method, bzip2, LZMA, encryption, a later version, and a size that is not the content's."""
    assert "a replay left no calls.jsonl" in refused(forged(tmp_path / "rank0.zip", offset, value))


def test_an_archive_whose_content_does_not_unpack_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "rank0.zip", CALL * 50)
    content = bytearray(path.read_bytes())
    content[45:60] = b"\xff" * 15
    path.write_bytes(content)
    assert "a replay left no calls.jsonl" in refused(path)


def test_an_archive_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "rank0.zip")
    content = path.read_bytes()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        refused(path)


def test_a_small_archive_that_states_a_huge_log_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = packed(tmp_path / "rank0.zip", b"[" + b"[]," * (7 << 20) + b"1]")
    assert path.stat().st_size < 1 << 16
    assert "a log of calls is too large to read\n  expected: 16777216 bytes at most" in refused(path)


def test_no_more_is_unpacked_than_the_archive_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path / "rank0.zip", b"\n" * (64 << 20))
    content = bytearray(path.read_bytes())
    at = content.find(DIRECTORY) + SIZE
    content[at : at + 4] = (100).to_bytes(4, "little")
    path.write_bytes(content)
    sizes: list[int] = []

    class Unpacking:
        """zlib's, which notes how much it made."""

        def __init__(self, inner: zlib._Decompress) -> None:
            self._inner = inner

        def decompress(self, data: bytes, most: int = 0) -> bytes:
            made = self._inner.decompress(data, most)
            sizes.append(len(made))
            return made

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    original = zipfile._get_decompressor  # type: ignore[attr-defined]
    monkeypatch.setattr(zipfile, "_get_decompressor", lambda method: Unpacking(original(method)))
    refused(path)
    assert max(sizes) <= 1 << 16


@pytest.mark.parametrize(
    ("read", "member"), [(read_steps, replay.STEPS), (read_records, replay.RECORDS), (read_types, replay.TYPES)]
)
def test_other_parts_that_are_nested_without_end_are_refused(tmp_path: Path, read, member: str) -> None:
    path = packed(tmp_path / "rank0.zip", b"[" * 100_000, zipfile.ZIP_STORED, member)
    with pytest.raises(RecordingError, match="of a replay are damaged"):
        read(path)
