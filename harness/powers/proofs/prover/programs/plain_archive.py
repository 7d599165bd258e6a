"""Reads a zip archive, and refuses it unless all readers would see the same files in it.

A zip file describes its contents in three places: a header before each file, a directory, and a record at the end.
Readers may trust different places. So all three must agree, and every byte must belong to one of these parts:

    headers and files | directory | zip64 record and locator, if any | end record
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from typing import NamedTuple

_LOCAL, _ENTRY, _DESCRIPTOR = b"PK\3\4", b"PK\1\2", b"PK\7\10"
_END, _LOCATOR, _END64 = b"PK\5\6", b"PK\6\7", b"PK\6\6"
_HAS_DESCRIPTOR, _IS_UTF8 = 1 << 3, 1 << 11
_SAYS_MORE = 0xFFFFFFFF
_NAME = re.compile(r"[A-Za-z0-9_.+-]+(/[A-Za-z0-9_.+-]+)*")

MOST_FILES = 1 << 16


class ArchiveError(ValueError):
    """The archive is damaged or ambiguous."""


class _Facts(NamedTuple):
    """The facts about a file that both its header and its entry in the directory state. Both must state the same.

    `stored` is the compressed size and `size` the real size, both in bytes.
    """

    name: str
    flags: int
    method: int
    checksum: int
    stored: int
    size: int


def files_of(content: bytes) -> Mapping[str, memoryview]:
    try:
        return _files_of(memoryview(content))
    except struct.error:
        raise ArchiveError("it is cut short") from None


def _files_of(content: memoryview) -> Mapping[str, memoryview]:
    num_files, directory, at_end = _end_of(content)
    files: dict[str, memoryview] = {}
    seen: set[str] = set()
    at, at_entry = 0, directory
    for _ in range(num_files):
        facts, header, at_entry = _entry(content, at_entry)
        # File systems without case would unpack both to the same file.
        if facts.name.lower() in seen:
            raise ArchiveError(f"it has two files of one name, {facts.name}")
        seen.add(facts.name.lower())
        # A gap, or an overlap, could hide a second file from readers that trust the headers.
        if header != at:
            raise ArchiveError(f"{facts.name} does not begin where the file before it ends: at byte {header}, not {at}")
        files[facts.name], at = _file(content, at, facts)
        if at > directory:
            raise ArchiveError(f"{facts.name} reaches into the directory")
    if at != directory or at_entry != at_end:
        raise ArchiveError("it has bytes that belong to no file")
    return files


def _end_of(content: memoryview) -> tuple[int, int, int]:
    """Return (number of files, position at which the directory begins, position at which it ends)."""
    # An end record without a comment has 22 bytes.
    if bytes(content[-22:-18]) != _END:
        raise ArchiveError("it does not end as a zip archive does")
    at_end = len(content) - 22
    disk, other, own, num_files, size, begin, comment = struct.unpack_from("<4H2IH", content, at_end + 4)
    # A comment could contain another end record, which some readers would find first.
    if disk or other or comment or own != num_files:
        raise ArchiveError("its end record has a comment, or names several disks")
    if at_end >= 20 and bytes(content[at_end - 20 : at_end - 16]) == _LOCATOR:
        disk, record, disks = struct.unpack_from("<IQI", content, at_end - 16)
        # The locator has 20 bytes, and the zip64 record in front of it 56.
        at_end -= 20 + 56
        if (disk, record, disks) != (0, at_end, 1) or at_end < 0 or bytes(content[at_end : at_end + 4]) != _END64:
            raise ArchiveError("its zip64 record is not where the locator says")
        length, _, _, disk, other, *stated = struct.unpack_from("<Q2H2I4Q", content, at_end + 4)
        # A zip64 record without extensions has 44 bytes after its length field.
        if length != 44 or disk or other or [own, num_files, size, begin] != stated:
            raise ArchiveError("its end record and its zip64 record say different things")
    if begin + size != at_end:
        raise ArchiveError("its directory does not end where the end record begins")
    if num_files > MOST_FILES:
        raise ArchiveError(f"it has more than {MOST_FILES} files")
    return num_files, begin, at_end


def _entry(content: memoryview, at: int) -> tuple[_Facts, int, int]:
    """Read the directory's entry at position `at`.

    Returns (facts of the file, position of its header, end of the entry).
    """
    if bytes(content[at : at + 4]) != _ENTRY:
        raise ArchiveError("its directory has fewer entries than the end record says")
    # The fixed part has 46 bytes. The name, extra data and a comment follow, with the lengths in `lengths`.
    _, _, flags, method, _, _, checksum, stored, size, *lengths = struct.unpack_from("<6H3I3H", content, at + 4)
    disk, _, _, header = struct.unpack_from("<2H2I", content, at + 34)
    name = _name(content[at + 46 : at + 46 + lengths[0]])
    # Compression could hide any size.
    if method != 0:
        raise ArchiveError(f"{name} is compressed; torch.export.save compresses nothing")
    if flags & ~(_HAS_DESCRIPTOR | _IS_UTF8):
        raise ArchiveError(f"{name} is encrypted or patched (flags {flags:#x})")
    if disk or stored != size or _SAYS_MORE in (stored, size, header) or lengths[2]:
        raise ArchiveError(f"{name} has sizes that disagree, a size of 4 GiB or more, or a comment")
    return _Facts(name, flags, method, checksum, stored, size), header, at + 46 + sum(lengths)


def _file(content: memoryview, at: int, facts: _Facts) -> tuple[memoryview, int]:
    if bytes(content[at : at + 4]) != _LOCAL:
        raise ArchiveError(f"{facts.name} has no header where the directory says")
    # The fixed part has 30 bytes. The name and extra data follow, then the file.
    _, flags, method, _, _, checksum, stored, size, *lengths = struct.unpack_from("<5H3I2H", content, at + 4)
    begin = at + 30 + sum(lengths)
    end = begin + facts.size
    name = _name(content[at + 30 : at + 30 + lengths[0]])
    if flags & _HAS_DESCRIPTOR:  # the sizes follow the file, and may be left out in front of it
        signature, *behind = struct.unpack_from("<4s3I", content, end)
        says = facts[3:]
        if signature != _DESCRIPTOR or tuple(behind) != says or (checksum, stored, size) not in ((0, 0, 0), says):
            raise ArchiveError(f"{facts.name} has other sizes behind it than in the directory")
        checksum, stored, size = says
    # Some readers trust the header, others the directory.
    if _Facts(name, flags, method, checksum, stored, size) != facts:
        raise ArchiveError(f"{facts.name} has another header in front of it than in the directory")
    data = content[begin:end]
    if len(data) != facts.size or zlib.crc32(data) != facts.checksum:
        raise ArchiveError(f"{facts.name} is damaged: its checksum does not fit")
    return data, end + (16 if flags & _HAS_DESCRIPTOR else 0)


def _name(raw: memoryview) -> str:
    # Any other byte becomes a character that `_NAME` does not allow.
    name = bytes(raw).decode("ascii", "replace")
    if not _NAME.fullmatch(name) or {".", ".."} & {*name.split("/")} or len(name) > 1000:
        raise ArchiveError(f"a file is named {name[:80]!r}: expected letters, digits and _ . + - between slashes")
    return name
