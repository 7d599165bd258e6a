from __future__ import annotations

import subprocess
import sys

import numpy
import pyarrow as pa
import pytest

from bitproof.harness.capture.columns import bools, column, values_of
from tests.harness.execute.test_launch import ROOT

VALUES = {
    pa.int32(): [0, 7, 2**31 - 1],
    pa.string(): ["", "lößs", "a\0b", "日本"],
    pa.list_(pa.int64()): [(), (3, 2**40), (1,)],
}


@pytest.mark.parametrize(("kind", "values"), VALUES.items(), ids=str)
def test_a_column_is_what_pyarrow_makes_of_the_values(kind, values):
    for some in (values, values * 9, []):
        made = column(some, pa.field("x", kind))
        made.validate(full=True)
        assert made.equals(pa.array(some, kind))


@pytest.mark.parametrize(("kind", "values"), VALUES.items(), ids=str)
def test_what_a_column_holds_is_what_it_was_made_of_also_in_chunks_and_cut_out_of_a_longer_one(kind, values):
    field = pa.field("x", kind)
    cut = column(values * 2, field).slice(1, 2)
    assert values_of(pa.chunked_array([column(values, field), column([], field), cut])) == [*values, *values[1:3]]
    assert values_of(pa.chunked_array([], kind)) == []


def test_null_is_none_and_equal_strings_are_one_object():
    first, null, second = values_of(pa.chunked_array([column(["layer", None, "layer"], pa.field("x", pa.string()))]))
    assert (first, null) == ("layer", None)
    assert second is first


def test_a_null_among_numbers_is_refused():
    with pytest.raises(pa.ArrowInvalid):
        values_of(pa.chunked_array([[1, None]], pa.int64()))


def test_what_is_none_is_null_and_what_is_empty_is_not():
    made = column([None, "", *"abcdefg", None], pa.field("x", pa.string()))
    assert made.to_pylist() == [None, "", *"abcdefg", None]
    assert made.null_count == 2


@pytest.mark.parametrize("values", [[], [True], [False] * 7 + [True] * 10])
def test_bools_come_back(values):
    assert bools(numpy.array(values, dtype=bool)).to_pylist() == values


def test_a_number_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        column([2**31], pa.field("x", pa.int32()))


LOADS = """
import sys
from pathlib import Path
from bitproof.harness.capture import recording_files as files
from bitproof.harness.records import Key, Manifest, Record
from bitproof.harness.report.markdown_text import table_of

folder = Path(sys.argv[1])
rows = [(Key(0, "loss", "loss", 0), Record("0" * 32, "float32", (), (1.0).hex())),
        (Key(0, "grad", "w", 0), Record("1" * 32, "float32", (2, 3), None, "nan"))]
files.warm_up()
files.write_part(folder / "part.parquet", rows)
files.write_recording(folder / "whole", Manifest(case={"name": "toy"}, system="eager", world_size=2, steps=2), rows)
assert len(files.read_recording(folder / "whole").records) == 2
assert len(files.read_recording(folder / "whole").losses()) == 1
assert "| a" in table_of(["a"], [["b"]])
sys.exit("pandas" in sys.modules)
"""


@pytest.mark.ranks
def test_writing_reading_and_reporting_what_ranks_recorded_loads_no_pandas(tmp_path):
    subprocess.run([sys.executable, "-c", LOADS, str(tmp_path)], check=True, cwd=ROOT)
