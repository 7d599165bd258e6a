"""A long recording is read rank by rank, from the file that was checked."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bitproof.harness.capture import recording_files
from bitproof.harness.capture import stored as stored_module
from bitproof.harness.capture.digest_table import COLUMNS
from bitproof.harness.capture.recording_files import join_parts, read_recording, write_part
from bitproof.harness.capture.stored import StoredRecording, have_same_rows, read_records
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.errors import RecordingError
from bitproof.harness.localize.differing import differing_digests
from bitproof.harness.localize.search import held_as
from bitproof.harness.records import Key, Manifest, Record, Recording
from tests.harness.forging import vouch

CASE = Case(name="tiny", family="toys", reference="eager", steps=2, parallelism=Parallelism(world_size=2, ep=1))
MANIFEST = Manifest(case=CASE.to_dict(), system="toy", steps=2, world_size=2)


@pytest.fixture(autouse=True)
def long(monkeypatch):
    """Every recording is one of too many rows to be held."""
    monkeypatch.setattr(recording_files, "HELD_BYTES", 0)
    monkeypatch.setattr(stored_module, "KEPT_ROWS", 0)


def rows_of(rank, dtype="float32"):
    keys = [Key(step, "loss", "loss", rank) for step in range(2)]
    return [(key, Record(f"{key.step}{rank}".rjust(32, "a"), dtype, (), f"0x1.{key.step}p+1")) for key in keys]


def joined(folder, *parts):
    """Read what joining ranks' rows leaves."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"part{number}" for number in range(len(parts))]
    for file, rows in zip(files, parts, strict=True):
        write_part(file, rows)
    join_parts(folder / "recording", MANIFEST, files)
    return read_recording(folder / "recording")


def test_a_rank_is_read_again_from_the_file_that_was_checked(tmp_path):
    side = joined(tmp_path / "here", rows_of(0), rows_of(1))
    joined(tmp_path / "here", rows_of(0, "bfloat16"), rows_of(1, "bfloat16"))  # another recording takes its place
    assert isinstance(side, StoredRecording) and side.ranks == (0, 1)
    assert side.records_of(1) == dict(rows_of(1))
    assert side.losses(0) == ["0x1.0p+1", "0x1.1p+1"]
    assert side.records == dict(rows_of(0) + rows_of(1))


def test_another_manifest_reads_no_record_and_keeps_those_that_were_changed(tmp_path):
    side, other = joined(tmp_path / "here", rows_of(0), rows_of(1)), replace(MANIFEST, system="other")
    reported = side.with_manifest(other)
    assert isinstance(reported, StoredRecording) and not side.holds_records and not reported.holds_records
    assert (reported.manifest, reported.records_of(1)) == (other, dict(rows_of(1)))
    side.records.clear()
    assert side.with_manifest(other).records == {}


def test_a_rank_that_recorded_nothing_has_no_records(tmp_path):
    side = joined(tmp_path / "here", rows_of(1))
    assert (side.ranks, side.records_of(0)) == ((1,), {})


def test_a_tensor_that_is_named_twice_by_one_rank_or_by_two_parts_is_refused(tmp_path):
    for name, second in (("twice", rows_of(1) * 2), ("again", rows_of(0) + rows_of(1))):
        with pytest.raises(RecordingError, match="names a tensor twice"):
            joined(tmp_path / name, rows_of(0), second)


def test_ranks_in_another_order_are_read_as_a_whole(tmp_path):
    side = joined(tmp_path / "here", rows_of(1), rows_of(0))
    assert not isinstance(side, StoredRecording)
    assert side.records == dict(rows_of(1) + rows_of(0))


def test_rows_are_seen_to_be_the_same_only_where_every_digest_is(tmp_path):
    side, same = (joined(tmp_path / name, rows_of(0), rows_of(1)) for name in ("here", "there"))
    other = [(key, record._replace(digest="b" * 32)) for key, record in rows_of(1)]
    third = joined(tmp_path / "other", rows_of(0), other)
    assert have_same_rows(side, same, 1) and have_same_rows(side, third, 0)
    assert not have_same_rows(side, third, 1)


def test_losses_are_read_without_any_other_record(tmp_path, monkeypatch):
    """By default the first rank's that has some: in a pipeline the first ranks have none."""
    loss = [(Key(step, "loss", "loss", 1), Record("c" * 32, "float32", (), f"0x1.{step}p+1")) for step in (1, 0)]
    grads = [[(Key(step, "grad", "w", rank), Record("a" * 32, "float32", (2,))) for step in (0, 1)] for rank in (0, 1)]
    side = joined(tmp_path / "here", grads[0], [*grads[1], *loss])
    made = []
    monkeypatch.setattr(stored_module, "read_records", lambda table: made.append(len(table)) or read_records(table))
    assert side.losses() == side.losses(1) == ["0x1.0p+1", "0x1.1p+1"]
    assert side.losses(0) == side.losses(7) == []
    assert max(made) == len(loss) and not side.holds_records
    assert Recording(side.manifest, side.records).losses() == ["0x1.0p+1", "0x1.1p+1"]


def test_a_search_makes_records_of_one_rank_and_step_alone(tmp_path, monkeypatch):
    """The rank that computed the first difference is told first, and each rank's differences as they were computed."""
    names = [("loss", "loss"), ("grad", "b"), ("grad", "a"), ("param", "b"), ("param", "a")]

    def rows(rank, wrong=()):
        keys = [Key(step, kind, name, rank) for step in range(2) for kind, name in names[:: -1 if rank else 1]]
        digest = {key: f"{key.step}{rank}{names.index(key[1:3])}{(key[1:] in wrong):d}".rjust(32, "c") for key in keys}
        return [(key, Record(digest[key], "float32", (2,), "0x1.0p+1" if key.kind == "loss" else None)) for key in keys]

    wrong = {("grad", "a", 0), ("param", "b", 0), ("param", "a", 1), ("grad", "b", 1)}
    sides = joined(tmp_path / "here", rows(0), rows(1)), joined(tmp_path / "there", rows(0, wrong), rows(1, wrong))
    made = []
    monkeypatch.setattr(stored_module, "read_records", lambda table: made.append(len(table)) or read_records(table))
    found = differing_digests(*sides, 1)
    reported = {rank: [(there[-2:], here[-2:]) for there, here in pairs] for rank, pairs in found.items()}
    assert list(reported) == [1, 0]
    assert reported == {1: [("10", "11"), ("40", "41")], 0: [("20", "21"), ("30", "31")]}
    assert held_as(*sides, Key(1, "grad", "a", 0)) is None
    assert set(made) == {len(names)} and not any(side.holds_records for side in sides)
    whole = tuple(Recording(side.manifest, side.records) for side in sides)
    assert differing_digests(*whole, 1) == found


@pytest.mark.parametrize("states", [True, False])
def test_a_small_file_that_is_a_huge_table_is_refused(tmp_path, monkeypatch, states):
    joined(tmp_path, rows_of(0))
    path = tmp_path / "recording" / "digests.parquet"
    table = pq.read_table(path).slice(0, 1)
    cells = pa.array(["0" * (300 << 20)])
    for name in ("placements", "box"):
        table = table.append_column(COLUMNS.field(name), pa.nulls(1, pa.string()))
    pq.write_table(table.append_column(COLUMNS.field("cells"), cells), path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 1 << 16
    vouch(tmp_path / "recording")
    if not states:
        monkeypatch.setattr(stored_module.DigestFile, "_stated_bytes", lambda file, groups: 0)
    with pytest.raises(RecordingError, match="is too large in memory"):
        read_recording(tmp_path / "recording")


@pytest.mark.parametrize("column", ["name", "digest", "kind", "dtype", "value"])
def test_one_long_text_in_every_row_is_refused_before_it_is_unpacked(tmp_path, column):
    """The file has the text once, and unpacked it would be 20 GB."""
    joined(tmp_path, rows_of(0))
    path = tmp_path / "recording" / "digests.parquet"
    rows = 1000
    table = pa.concat_tables([pq.read_table(path).slice(0, 1)] * rows)
    long = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["n" * 20_000_000]))
    place = table.schema.get_field_index(column)
    forged = table.set_column(place, pa.field(column, long.type, nullable=table.schema.field(place).nullable), long)
    pq.write_table(forged, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1 << 16
    vouch(tmp_path / "recording")
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())  # its maximum begins at 0
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(RecordingError, match="is too large in memory"):
            read_recording(tmp_path / "recording")
    finally:
        pa.set_memory_pool(usual)
    assert 20_000_000 < pool.max_memory() < 500 << 20
