import contextlib
import json
import os
import random
import resource
from dataclasses import replace
from unittest.mock import ANY

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bitproof.harness.capture import recording_files, stored
from bitproof.harness.capture.recording_files import (
    add_calls,
    checked_values_path,
    join_parts,
    put_in_place,
    read_manifest,
    read_recording,
    write_part,
    write_recording,
)
from bitproof.harness.capture.selection import name_value
from bitproof.harness.capture.values import open_values_of
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Key, Manifest, Record
from tests.harness.forging import make_recording, vouch

CASE = Case(
    name="toy", family="x", reference="a:b", candidate="c:d", steps=2, parallelism=Parallelism(world_size=1, ep=1)
)

MANIFEST = Manifest(case={"name": "toy"}, system="eager", world_size=2, steps=2)
ROWS = [
    (Key(0, "loss", "loss", 0), Record("0" * 32, "float32", (), "0x1.8000000000000p+1")),
    (Key(0, "grad", "layers.0.w", 0), Record("a" * 32, "bfloat16", (2, 3))),
    (Key(1, "buffer", "counts@after_optimizer", 1), Record("b" * 32, "int64", (0,))),
]


@pytest.fixture
def folder(tmp_path):
    write_recording(tmp_path / "recording", MANIFEST, ROWS)
    return tmp_path / "recording"


def write_columns(folder, **changes):
    """Replace columns of the recording, unchecked."""
    table = recording_files._table(ROWS)
    for name, values in changes.items():
        index = table.column_names.index(name)
        table = table.set_column(index, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    pq.write_table(table, folder / "digests.parquet")
    vouch(folder)


def refusal(folder):
    with pytest.raises(RecordingError) as error:
        read_recording(folder)
    return str(error.value)


def test_a_recording_comes_back_as_it_was_written(folder):
    recording = read_recording(folder)
    assert list(recording.records.items()) == ROWS
    sums = {"digests_sha256": ANY, "manifest_sha256": ANY}
    assert recording.manifest == replace(MANIFEST, **sums)
    assert recording.losses() == ["0x1.8000000000000p+1"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["recording"]


def test_parts_join_in_the_order_given(tmp_path):
    write_part(tmp_path / "1", ROWS[2:])
    write_part(tmp_path / "0", ROWS[:2])
    join_parts(tmp_path / "joined", MANIFEST, [tmp_path / "0", tmp_path / "1"])
    assert list(read_recording(tmp_path / "joined").records.items()) == ROWS


def test_a_recording_is_replaced_whole(folder):
    write_recording(folder, MANIFEST, ROWS[:1])
    assert len(read_recording(folder).records) == 1


def test_a_recording_written_from_anothers_manifest_claims_only_its_own_files(folder, tmp_path):
    manifest = read_manifest(make_recording(tmp_path / "with_values", CASE))
    write_recording(folder, manifest, read_recording(tmp_path / "with_values").records.items())
    assert read_recording(folder).manifest.values_sha256 is None


def test_a_recording_that_could_not_be_written_leaves_the_old_one(folder):
    with pytest.raises(TypeError):
        write_recording(folder, replace(MANIFEST, steps=object()), ROWS[:1])
    assert len(read_recording(folder).records) == 3
    assert sorted(path.name for path in folder.parent.iterdir()) == ["recording"]


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """What a disk that is full does to whoever writes, without a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 100, 6_000])  # within the digests or, as they are here, after them
def test_a_recording_on_a_full_disk_is_reported_and_leaves_the_old_one(folder, num_bytes):
    manifest = replace(MANIFEST, case={"name": "toy " * 2_000})
    with files_of_at_most(num_bytes), pytest.raises(RecordingError, match="make room on its disk") as error:
        write_recording(folder, manifest, ROWS[:1])
    assert str(folder) in str(error.value) and "File too large" in str(error.value)
    assert len(read_recording(folder).records) == 3
    assert sorted(path.name for path in folder.parent.iterdir()) == ["recording"]


def test_calls_on_a_full_disk_are_reported(folder):
    with files_of_at_most(100), pytest.raises(RecordingError, match="the recording cannot be written"):
        add_calls(folder, 0, [b"x" * 200])


@pytest.mark.parametrize("name", ["manifest.json", "digests.parquet"])
def test_a_missing_file_is_refused(folder, name):
    (folder / name).unlink()
    text = refusal(folder)
    assert text.startswith(f"RecordingError: {folder / name} ") and "\n  found: No such file or directory\n" in text


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_truncated_digests_are_refused(folder, keep):
    path = folder / "digests.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    assert refusal(folder).startswith(f"RecordingError: {path} is damaged, or not the one that the manifest")
    vouch(folder)
    assert refusal(folder).startswith(f"RecordingError: {path} is damaged\n  found: ")


def test_garbage_is_refused(folder):
    path = folder / "digests.parquet"
    path.write_bytes(b"\x80\x04\x95 not parquet" * 100)
    vouch(folder)
    assert refusal(folder).startswith(f"RecordingError: {path} is damaged")


def test_no_flipped_byte_of_the_digests_passes_for_another_recording(folder):
    path = folder / "digests.parquet"
    content = path.read_bytes()
    for index in range(0, len(content), 7):
        path.write_bytes(content[:index] + bytes([content[index] ^ 0x55]) + content[index + 1 :])
        assert str(path) in refusal(folder)


def test_bytes_flipped_with_intent_break_no_more_than_the_recording(folder):
    path = folder / "digests.parquet"
    content = path.read_bytes()
    for index in range(0, len(content), 7):
        path.write_bytes(content[:index] + bytes([content[index] ^ 0x55]) + content[index + 1 :])
        vouch(folder)
        with contextlib.suppress(RecordingError):
            read_recording(folder)


def test_wrong_columns_are_refused(folder):
    path = folder / "digests.parquet"
    pq.write_table(pa.table({"step": [1], "digest": ["x"]}), path)
    vouch(folder)
    assert refusal(folder) == (
        f"RecordingError: {path} has the wrong columns\n"
        "  expected: step: int32, rank: int32, kind: string, name: string, digest: string, dtype: string, "
        "shape: list<item: int64>, value: string, content: string, placements: string, box: string, cells: string\n"
        "  found: step: int64, digest: string"
    )


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("step", [0, 0, 2], "step in 0..1"),
        ("step", [0, 0, -1], "step in 0..1"),
        ("rank", [0, 0, 2], "rank in 0..1"),
        (
            "kind",
            ["loss", "grad", "weight"],
            "kind among loss, grad, param, buffer, optimizer, grad_norm, activation, rng",
        ),
        ("name", ["loss", "", "c"], "name of 1 to 1000 printable characters"),
        ("name", ["loss", "\x1b[31m", "c"], "name of 1 to 1000 printable characters"),
        ("name", ["loss", "../../w", "c"], "name that leads nowhere else"),
        ("name", ["loss", "a/..", "c"], "name that leads nowhere else"),
        ("digest", ["0" * 32, "a" * 31, "b" * 32], "digest of 32 hexadecimal digits"),
        ("digest", ["0" * 32, "A" * 32, "b" * 32], "digest of 32 hexadecimal digits"),
        ("dtype", ["float32", "../x", "int64"], "dtype by its name"),
        ("shape", [[], [2, -3], [0]], "sizes that are not negative"),
        ("value", [None, None, None], "a value for each loss and for nothing else"),
        ("value", ["0x1.0p+0", "0x1.0p+0", None], "a value for each loss and for nothing else"),
        ("value", ["3.0", None, None], "losses as hexadecimal floats"),
    ],
)
def test_values_out_of_range_are_refused(folder, column, values, expected):
    write_columns(folder, **{column: values})
    assert refusal(folder) == (
        f"RecordingError: {folder / 'digests.parquet'} holds a value out of range\n  expected: {expected}"
    )


def test_a_key_that_comes_twice_is_refused(folder):
    write_recording(folder, MANIFEST, [*ROWS, ROWS[1]])
    assert refusal(folder) == (
        f"RecordingError: {folder / 'digests.parquet'} names a tensor twice\n"
        "  expected: each (step, kind, name, rank) once"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 2}, "was written by another version of bitproof\n  expected: schema 1\n  found: schema 2"),
        ({"steps": "2"}, "is no manifest\n  expected: steps, of type int\n  found: str"),
        ({"steps": True}, "is no manifest\n  expected: steps, of type int\n  found: bool"),
        ({"case": ["toy"]}, "is no manifest\n  expected: case, of type dict\n  found: list"),
        ({"steps": 0}, "is no manifest\n  expected: steps and world_size from 1 on, and 10000000 at most together"),
        ({"world_size": -2}, "is no manifest\n  expected: steps and world_size from 1 on, and 10000000 at most"),
        ({"steps": 10**40}, "is no manifest\n  expected: steps and world_size from 1 on, and 10000000 at most"),
        ({"values": "*"}, "is no manifest\n  expected: values, if there, as patterns of tensors"),
        ({"values": ["*", {}]}, "is no manifest\n  expected: values, if there, as patterns of tensors"),
        ({"machine": json.loads("[" * 60 + "1" + "]" * 60)}, "is no manifest\n  expected: values nested 50 deep"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(folder, change, text):
    vouch(folder, **change)
    assert refusal(folder).startswith(f"RecordingError: {folder / 'manifest.json'} {text}")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"machine": []}, "manifest.machine is damaged\n  expected: an object\n  found: []"),
        ({"graph": {"passes": [1]}}, "manifest.graph.passes[0] is damaged\n  expected: an object\n  found: 1"),
        ({"ranks": "many"}, "manifest.ranks is damaged\n  expected: an array\n  found: 'many'"),
        ({"chunked": {"layers.0": "1"}}, "manifest.chunked.layers.0 is damaged\n  expected: an integer\n  found: '1'"),
        ({"values_sha256": "0"}, "manifest.values_sha256 is damaged\n  expected: an array\n  found: '0'"),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_refused_by_its_path(folder, change, text):
    vouch(folder, **change)
    assert refusal(folder) == f"RecordingError: {text}\n  came from: {folder / 'manifest.json'}"


def test_a_manifest_of_before_and_one_with_fields_of_later_are_read(folder):
    path = folder / "manifest.json"
    early = {name: value for name, value in json.loads(path.read_text()).items() if value not in (None, [])}
    path.write_text(json.dumps(early | {"moon": "full"}))
    vouch(folder)
    assert set(early) == {"schema", "case", "system", "world_size", "steps", "digests_sha256", "manifest_sha256"}
    assert replace(read_recording(folder).manifest, digests_sha256=None, manifest_sha256=None) == MANIFEST


def test_a_manifest_edited_by_hand_is_refused(folder):
    path = folder / "manifest.json"
    known = json.loads(path.read_text())["manifest_sha256"]
    path.write_text(path.read_text().replace('"system": "eager"', '"system": "graph"'))
    assert refusal(folder).startswith(
        f"RecordingError: {path} is damaged\n  expected: sha256 {known} of what it says\n  found: sha256 "
    )


def test_a_manifest_laid_out_otherwise_says_the_same(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert list(read_recording(folder).records.items()) == ROWS


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "[1]", "\udcff"])
def test_what_is_no_manifest_is_refused(folder, content):
    path = folder / "manifest.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert refusal(folder).startswith(f"RecordingError: {path} is ")


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(folder):
    (folder / "digests.parquet").unlink()
    os.mkfifo(folder / "digests.parquet")
    assert refusal(folder) == f"RecordingError: {folder / 'digests.parquet'} is not a regular file"


@pytest.mark.parametrize("name", ["manifest.json", "digests.parquet"])
def test_a_link_in_place_of_a_file_is_refused(folder, tmp_path, name):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert refusal(folder) == (
        f"RecordingError: {folder / name} is a symbolic link\n  expected: a recording whole in its own folder"
    )


def test_a_link_in_place_of_values_or_their_folder_is_refused(tmp_path):
    folder = make_recording(tmp_path / "recording", CASE)
    manifest, values = read_manifest(folder), folder / "values"
    values.rename(tmp_path / "values")
    values.symlink_to(tmp_path / "values")
    with pytest.raises(RecordingError, match="values is a symbolic link"):
        checked_values_path(folder, manifest, 0)
    values.unlink()
    values.mkdir()
    (values / "rank0.safetensors").symlink_to(tmp_path / "values" / "rank0.safetensors")
    with pytest.raises(RecordingError, match=r"rank0.safetensors is a symbolic link"):
        checked_values_path(folder, manifest, 0)


def test_a_small_file_that_unpacks_to_a_huge_table_is_refused(folder, monkeypatch):
    rows = 100_000
    columns = {name: [value] * rows for name, value in (ROWS[1][0]._asdict() | ROWS[1][1]._asdict()).items()}
    table = pa.table(columns | {"name": ["n" * 1000] * rows}, schema=recording_files.COLUMNS)
    pq.write_table(table, folder / "digests.parquet", compression="zstd")
    assert (folder / "digests.parquet").stat().st_size < 100_000
    vouch(folder)
    monkeypatch.setattr(stored, "MAX_DIGESTS_BYTES", 20_000_000)
    assert refusal(folder).startswith(
        f"RecordingError: {folder / 'digests.parquet'} is too large in memory\n  expected: 20000000 bytes at most\n"
    )
    monkeypatch.setattr(stored, "MAX_ROWS", 10)
    assert refusal(folder).endswith("digests.parquet is too large\n  found: 100000 rows")


def test_a_new_folder_takes_the_place_of_an_old_one_and_nothing_stays_beside_it(folder, tmp_path):
    write_recording(tmp_path / "new", replace(MANIFEST, system="graph"), ROWS)
    put_in_place(tmp_path / "new", folder)
    assert read_recording(folder).manifest.system == "graph"
    assert [path.name for path in tmp_path.iterdir()] == ["recording"]


def test_the_old_folder_stays_where_the_new_one_cannot_be_put(folder, tmp_path):
    with pytest.raises(OSError):
        put_in_place(tmp_path / "missing", folder)
    assert read_recording(folder).manifest.system == "eager"
    assert [path.name for path in tmp_path.iterdir()] == ["recording"]


def everything_in(folder):
    """All that a recording says: what a reader could take for true."""
    recording = read_recording(folder)
    manifest = recording.manifest
    tensors = {}
    for rank in range(manifest.world_size):
        with open_values_of(folder, recording, rank) as values:
            for key in (key for key in recording.records if key.rank == rank and name_value(key) in values.names):
                tensors[key] = values.read_recorded(key, recording.records[key]).tolist()
    return json.dumps([manifest.to_dict(), list(recording.records.items()), list(tensors.items())])


@pytest.mark.parametrize("name", ["manifest.json", "digests.parquet", "values/rank0.safetensors"])
def test_damage_anywhere_is_refused_or_changes_nothing(tmp_path, name):
    chance = random.Random(0)
    folder = make_recording(tmp_path / "recording", CASE)
    path, whole = folder / name, everything_in(folder)
    content = path.read_bytes()
    refused = 0
    for number in range(100):
        damaged = bytearray(content)
        if number % 5 == 0:
            del damaged[chance.randrange(len(content)) :]
        else:
            for _ in range(chance.randint(1, 3)):
                damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            assert everything_in(folder) == whole
        except RecordingError as error:
            refused += 1
            assert str(folder) in str(error)
    assert refused > 80


@pytest.mark.parametrize("name", ["manifest.json", "digests.parquet", "values/rank0.safetensors"])
def test_damage_done_with_intent_ends_in_a_refusal_at_worst(tmp_path, name):
    chance = random.Random(1)
    folder = make_recording(tmp_path / "recording", CASE)
    path, manifest = folder / name, (folder / "manifest.json").read_bytes()
    content = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(content))] = chance.randrange(256)
        (folder / "manifest.json").write_bytes(manifest)
        path.write_bytes(damaged)
        with contextlib.suppress(RecordingError, ValueError if name == "manifest.json" else RecordingError):
            if name != "manifest.json" or isinstance(json.loads(damaged), dict):
                vouch(folder)
        with contextlib.suppress(RecordingError):
            everything_in(folder)


def test_a_file_too_large_is_refused_unread(folder, monkeypatch):
    monkeypatch.setattr(stored, "MAX_DIGESTS_BYTES", 10)
    assert refusal(folder).startswith(f"RecordingError: {folder / 'digests.parquet'} is too large")


def test_names_of_any_script_and_sizes_beyond_32_bits_are_kept(folder):
    rows = [*ROWS, (Key(0, "param", "couche_é.β", 0), Record("0" * 32, "float32", (2**31, 3), None, "zero"))]
    write_recording(folder, MANIFEST, rows)
    assert list(read_recording(folder).records.items()) == rows


@pytest.mark.parametrize("name", ["a\u200bb", "a\u202eb", "a\u2028b", "a" * 1001])
def test_names_that_hide_something_or_have_no_end_are_refused(folder, name):
    write_recording(folder, MANIFEST, [*ROWS, (Key(0, "param", name, 0), Record("0" * 32, "float32", ()))])
    assert "name of 1 to 1000 printable characters" in refusal(folder)


def test_a_content_that_is_none_of_ours_is_refused(folder):
    write_recording(folder, MANIFEST, [*ROWS, (Key(0, "param", "x", 0), Record("0" * 32, "float32", (), None, "one"))])
    assert "content absent, nan, inf or zero" in refusal(folder)


def test_a_recording_from_before_contents_were_reported_is_read(folder):
    write_recording(folder, MANIFEST, ROWS)
    path = folder / "digests.parquet"
    table = pq.read_table(path).drop_columns("content")
    shape = table.schema.get_field_index("shape")
    field = pa.field("shape", pa.list_(pa.int32()), nullable=False)
    pq.write_table(table.set_column(shape, field, table["shape"].cast(field.type)), path)
    vouch(folder)
    assert list(read_recording(folder).records.items()) == list(ROWS)
