"""Certificates: written, read back, and refused where they contradict themselves."""

import json
from dataclasses import asdict, replace

import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.moved.certificate_text import lines_of, markdown_of
from bitproof.harness.powers.moved.command import status_of
from bitproof.harness.powers.moved.records import (
    MovedCertificate,
    MovedRow,
    Verified,
    read_certificate,
    write_certificate,
)

ROW = MovedRow(
    operator="aten.mm.default",
    dtypes=["float32"],
    shapes=[[8, 32], [32, 8]],
    state="moved",
    elements=3,
    total=64,
    ulps=1,
    where="all elements",
    first=[(0, "1.0", "2.0")],
    causes=["a fused multiply-add"],
)
GOOD = MovedCertificate(
    program="train.py",
    steps=1,
    old={"torch": "2.13.0"},
    new={"torch": "2.15.0"},
    calls=2,
    operators=2,
    equal=1,
    rows=[ROW],
    verified=Verified(plain="DIFFERENT", first="loss", with_exchange="EQUAL", records=4, exchanged=2),
)
EQUAL = replace(GOOD, equal=2, rows=[], verified=Verified(plain="EQUAL", records=4))


def test_a_certificate_is_read_back_as_it_was_written(tmp_path):
    write_certificate(tmp_path / "moved.json", GOOD)
    assert read_certificate(tmp_path / "moved.json") == GOOD


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"equal": 2}, "2 equal calls and 1 others, of 2"),
        ({"operators": 3}, "3 operators in 2 calls"),
        ({"verified": replace(GOOD.verified, plain="EQUAL")}, "an exchange was verified"),
        ({"verified": replace(GOOD.verified, exchanged=0)}, "an exchange without a moved call"),
        ({"verified": replace(GOOD.verified, remainder="x")}, "a remainder"),
        ({"rows": [replace(ROW, elements=65)]}, "more elements moved"),
    ],
)
def test_a_certificate_that_contradicts_itself_is_refused(tmp_path, change, text):
    write_certificate(tmp_path / "moved.json", replace(GOOD, **change))
    with pytest.raises(RecordingError, match=text):
        read_certificate(tmp_path / "moved.json")


def test_each_field_of_another_type_is_refused(tmp_path):
    path, count = tmp_path / "moved.json", 0
    for name in asdict(GOOD):
        for value in (None, -1, "text", [1], {"a": []}, 1.5, True):
            path.write_text(json.dumps(asdict(GOOD) | {name: value}))
            if name == "program" and value == "text":
                continue
            with pytest.raises(RecordingError):
                read_certificate(path)
            count += 1
    assert count > 80


def test_the_last_line_says_whether_the_calls_are_the_whole_difference():
    assert [*lines_of(GOOD)][-1] == "  these calls account for the whole difference"
    rest = replace(GOOD, verified=replace(GOOD.verified, with_exchange="DIFFERENT", remainder="not from an operator"))
    assert "do not account for the whole difference. The rest is not from an operator" in [*lines_of(rest)][-1]
    assert [*lines_of(EQUAL)][-1] == "the program: all 4 records are EQUAL"


def test_foreign_text_is_no_markup_in_the_page():
    page = markdown_of(replace(GOOD, program="a|b`<img>\n# x"))
    assert "a\\|b\\`\\<img\\> \\# x" in page and "\n# x" not in page


def test_the_exit_status_says_what_was_found():
    states = ("moved", "missing", "signature", "nondeterministic", "not replayed", "failed")
    assert [
        status_of(EQUAL),
        *(status_of(replace(GOOD, rows=[replace(ROW, state=s)], verified=Verified())) for s in states),
    ] == [*(0, 1, 1, 1, 1, 3, 3)]
