"""A precompiled step's file is read as it was written, or refused: no byte of it may be another."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path

import pytest

from bitproof.harness.errors import ArtifactError
from bitproof.harness.precompile import file

VALUE = {"graph": [1, None, "mm"], "nan": float("inf")}


def refused(folder: Path) -> ArtifactError:
    with pytest.raises(ArtifactError) as error:
        file.read(folder)
    return error.value


def test_what_was_written_is_read(tmp_path: Path) -> None:
    wrote = file.write(tmp_path, VALUE)
    assert file.read(tmp_path) == wrote == (VALUE, wrote.content, (tmp_path / file.NAME).stat().st_size)
    assert os.listdir(tmp_path) == [file.NAME], "nothing else is left there"


def test_any_byte_changed_in_any_bit_or_left_out_is_refused(tmp_path: Path) -> None:
    file.write(tmp_path, VALUE)
    path = tmp_path / file.NAME
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        for other in (byte ^ 1, byte ^ 128):
            path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
            refused(tmp_path)
        path.write_bytes(whole[:place] + whole[place + 1 :])
        refused(tmp_path)
    path.write_bytes(whole + b"\0")
    assert refused(tmp_path).what == "the precompiled step is damaged"
    path.write_bytes(whole)
    assert file.read(tmp_path).value == VALUE


def test_no_file_and_a_foreign_one_are_refused_by_name(tmp_path: Path) -> None:
    assert refused(tmp_path).what == "there is no precompiled step"
    (tmp_path / file.NAME).write_bytes(b"PK\3\4 a pickle of somebody's")
    assert str(refused(tmp_path)) == (
        "ArtifactError: the file is no precompiled step\n"
        "  expected: a file that begins with 'bitproof precompiled step 1 '\n"
        '  found: b"PK\\x03\\x04 a pickle of somebody\'s"\n'
        f"  came from: {tmp_path / file.NAME}"
    )


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / file.NAME)
    assert str(refused(tmp_path)) == (
        "ArtifactError: the precompiled step cannot be read\n"
        "  found: it is a pipe, not a regular file\n"
        f"  came from: {tmp_path / file.NAME}"
    )
    (tmp_path / file.NAME).unlink()
    (tmp_path / file.NAME).symlink_to("/dev/zero")
    assert refused(tmp_path).found == "it is a device, not a regular file"
    (tmp_path / file.NAME).unlink()
    (tmp_path / file.NAME).mkdir()
    assert refused(tmp_path).found == "it is a folder, not a regular file"
    assert refused(tmp_path / file.NAME / "none").what == "there is no precompiled step"


def test_a_link_to_a_step_is_read_and_replaced_by_a_new_one_which_leaves_the_other_as_it_was(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    file.write(there, VALUE)
    (here / file.NAME).symlink_to(there / file.NAME)
    assert file.read(here).value == VALUE
    file.begin(here, "moe_seq")
    assert "was not finished" in str(refused(here))
    assert file.read(there).value == VALUE


def test_compiled_code_beside_a_step_is_called_so_and_goes_when_another_step_is_begun(tmp_path: Path) -> None:
    file.write(tmp_path, VALUE, file.COMPILED)
    assert file.read(tmp_path, file.COMPILED).value == VALUE
    file.begin(tmp_path, "moe_seq")
    with pytest.raises(ArtifactError, match="there is no precompiled step's compiled code\n  expected: a file comp"):
        file.read(tmp_path, file.COMPILED)
    (tmp_path / file.COMPILED).write_text("mine")
    with pytest.raises(ArtifactError, match="stands in the way"):
        file.begin(tmp_path, "moe_seq")
    assert (tmp_path / file.COMPILED).read_text() == "mine"


def test_a_body_that_is_larger_than_it_may_be_or_no_json_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(body: bytes) -> None:
        line = b"bitproof precompiled step 1 " + hashlib.sha256(body).hexdigest().encode()
        (tmp_path / file.NAME).write_bytes(line + b"\n" + body)

    put(zlib.compress(b"[" * 100_000))
    assert refused(tmp_path).what == "the precompiled step holds no JSON"
    put(b"no zlib")
    assert refused(tmp_path).what == "the precompiled step holds no JSON"
    most = 1000
    monkeypatch.setattr(file, "MAX_BYTES", most)
    put(zlib.compress(json.dumps("1" * (most - 2)).encode()))
    assert file.read(tmp_path).value == "1" * (most - 2)
    put(zlib.compress(json.dumps("1" * (most - 1)).encode()))
    assert "the precompiled step holds no JSON" in str(refused(tmp_path)) and "1000 bytes" in str(refused(tmp_path))
    (tmp_path / file.NAME).write_bytes(bytes(most + 1))
    assert "cannot be read\n  found: more than 1000 bytes" in str(refused(tmp_path))


def test_a_small_file_that_unpacks_into_lists_without_end_is_refused(tmp_path: Path) -> None:
    body = zlib.compress(b"[" + b"[]," * (7 << 20) + b"1]")
    line = b"bitproof precompiled step 1 " + hashlib.sha256(body).hexdigest().encode()
    (tmp_path / file.NAME).write_bytes(line + b"\n" + body)
    assert len(body) < 1 << 16
    assert "larger than 16777216 bytes" in str(refused(tmp_path))


def test_what_is_being_made_leaves_no_older_file_in_its_place(tmp_path: Path) -> None:
    file.begin(tmp_path / "made", "moe_seq")
    file.write(tmp_path / "made", VALUE)
    file.begin(tmp_path / "made", "moe_seq")
    assert "the precompiled step of moe_seq was not finished" in str(refused(tmp_path / "made"))
    file.note_unfinished(tmp_path / "made", "moe_seq", "TraceError: it cannot be traced")
    assert refused(tmp_path / "made").found == "TraceError: it cannot be traced"
    file.begin(tmp_path / "made", "moe_seq")
    file.write(tmp_path / "made", VALUE)
    assert file.read(tmp_path / "made").value == VALUE


def test_a_file_of_somebody_elses_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / file.NAME).write_text("mine")
    with pytest.raises(ArtifactError, match="stands in the way"):
        file.begin(tmp_path, "moe_seq")
    assert (tmp_path / file.NAME).read_text() == "mine"


def test_a_write_that_fails_leaves_the_note_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.begin(tmp_path, "moe_seq")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ArtifactError, match="No space left on device"):
        file.write(tmp_path, VALUE)
    assert os.listdir(tmp_path) == [file.NAME] and "was not finished" in str(refused(tmp_path))
