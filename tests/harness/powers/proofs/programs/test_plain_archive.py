import io
import struct
import zipfile

import pytest

from bitproof.harness.powers.proofs.prover.programs.plain_archive import ArchiveError, files_of

FILES = {"a/one": b"first", "a/two": b"", "a/sub/three": b"x" * 70}


def archive(files=FILES, compression=zipfile.ZIP_STORED):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as writer:
        for name, data in files.items():
            writer.writestr(name, data)
    return content.getvalue()


def with_zip64(content, *, record=None, **changed):
    """The archive with a zip64 record, as torch writes it."""
    end = content[-22:]
    num, size, begin = struct.unpack("<HII", end[10:20])
    reported = {"num": num, "size": size, "begin": begin} | changed
    at = len(content) - 22 if record is None else record
    more = struct.pack(
        "<4sQHHIIQQQQ",
        b"PK\6\6",
        44,
        45,
        45,
        0,
        0,
        reported["num"],
        reported["num"],
        reported["size"],
        reported["begin"],
    )
    return content[:-22] + more + struct.pack("<4sIQI", b"PK\6\7", 0, at, 1) + end


def test_an_archive_is_read():
    assert {name: bytes(data) for name, data in files_of(archive()).items()} == FILES
    assert {*files_of(with_zip64(archive()))} == {*FILES}
    assert files_of(archive({})) == {}


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (b"", "does not end"),
        (b"PK\5\6" + bytes(17), "does not end"),
        (b"\x7fELF" + archive(), "directory does not end where"),
        (archive() + b"x", "does not end"),
        (archive()[:-1] + b"\1" + b"x", "does not end"),
        (archive()[:-2] + b"\1\0", "a comment"),
        (archive()[5:], "directory does not end where"),
        (archive(compression=zipfile.ZIP_DEFLATED), "is compressed"),
        (archive({"a/one": b"1", "A/one": b"2"}), "two files of one name"),
        (archive({"a/../b": b""}), "a file is named"),
        (archive({"/etc/x": b""}), "a file is named"),
        (archive({"a\u202eb": b""}), "a file is named"),
        (with_zip64(archive(), record=0), "zip64 record is not where"),
        (with_zip64(archive(), begin=0), "say different things"),
        (with_zip64(archive(), num=1), "say different things"),
        (archive().replace(b"first", b"fjrst"), "checksum does not fit"),
        (archive().replace(b"a/one", b"b/one", 1), "another header in front"),
    ],
)
def test_an_archive_that_readers_could_see_differently_is_refused(content, reported):
    with pytest.raises(ArchiveError, match=reported):
        files_of(content)


def test_bytes_between_files_are_refused():
    content = bytearray(archive())
    begin = struct.unpack("<I", content[-6:-2])[0]
    content[begin:begin] = b"hidden"
    content[-6:-2] = struct.pack("<I", begin + 6)
    with pytest.raises(ArchiveError, match="belong to no file"):
        files_of(bytes(content))


@pytest.mark.parametrize("flag", [1, 1 << 5, 1 << 6, 1 << 13])
def test_an_encrypted_or_patched_file_is_refused(flag):
    content = bytearray(archive({"a": b"x"}))
    begin = struct.unpack("<I", content[-6:-2])[0]
    for at in (6, begin + 8):
        content[at : at + 2] = struct.pack("<H", flag)
    with pytest.raises(ArchiveError, match="encrypted"):
        files_of(bytes(content))


def test_every_single_changed_byte_of_a_header_is_seen_or_changes_nothing():
    content = archive()
    for at in range(len(content)):
        for value in (0, 0xFF, content[at] ^ 1):
            forged = content[:at] + bytes([value]) + content[at + 1 :]
            try:
                found = files_of(forged)
            except ArchiveError:
                continue
            assert {name: bytes(data) for name, data in found.items()} == FILES
