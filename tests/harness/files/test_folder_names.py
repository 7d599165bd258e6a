from __future__ import annotations

import random
import unicodedata

import pytest

from bitproof.harness.files.folder_names import file_name, longer_name

ARMS = ("", ".candidate", ".control", ".replay1", ".stress", ".candidate.control", ".archives1")
PAIRS = [
    ("sub/t.py:make", "sub-t.py:make"),
    ("t.py:make", "t.py/make"),
    ("T.py:make", "t.py:make"),
    ("Toy", "toy"),
    ("é.py:make", "e\u0301.py:make"),
    (".toy", "toy"),
    ("t.py:make.control", "t.py:make"),
    ("自" * 80 + ".py:make", "自" * 81 + ".py:make"),
    ("a" * 60, "a" * 61),
    ("\ud800", "\ud801"),
    ("", "name"),
]


@pytest.mark.parametrize("name", ["eager", "eager_chunked", "graph", "compiled", "toy", "x9"])
def test_a_name_that_is_safe_everywhere_stays_as_it_is(name) -> None:
    assert file_name(name) == name


def test_another_name_stays_readable_at_its_end() -> None:
    assert file_name("sub/t.py:make").startswith("sub-t.py-make-")
    assert file_name("a" * 500 + "/train.py:make").rpartition("-")[0].endswith("a-train.py-make")


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_two_names_never_share_a_file_whatever_is_appended(left, right) -> None:
    files = [_on_any_disk(file_name(name) + arm) for name in (left, right) for arm in ARMS]
    assert len(set(files)) == len(files)


def test_twenty_thousand_odd_names_have_as_many_files_all_of_them_short() -> None:
    draw = random.Random(0)
    letters = "aAbB01_-./:\\ é自\u0301\x00\n~*?%"
    names = {"".join(draw.choices(letters, k=draw.randrange(1, 9))) for _ in range(20_000)}
    names |= {letter * count for letter in letters for count in range(200)}
    files = [file_name(name) for name in names]
    assert len({_on_any_disk(file) for file in files}) == len(names)
    assert all(file.isascii() and len(file) <= 80 and file[0] not in ".-" and "/" not in file for file in files)


def test_a_longer_name_is_cut_and_stays_a_name_of_its_own() -> None:
    assert longer_name("moe_seq", "_until_3_chunk", 100) == "moe_seq_until_3_chunk"
    cut = [longer_name("m" * 100, f"_until_{index}_chunk", 100) for index in range(20)]
    assert len({*cut}) == 20 and all(len(name) == 100 for name in cut)


def _on_any_disk(file: str) -> str:
    """As a file system that ignores case and composes letters would have it."""
    return unicodedata.normalize("NFC", file).casefold()
