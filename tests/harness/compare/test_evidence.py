"""Comparing rank by rank says what comparing records says, of any two recordings."""

import random

import pytest

from bitproof.harness.capture import recording_files
from bitproof.harness.capture import stored as stored_module
from bitproof.harness.capture.recording_files import join_parts, read_recording, write_part, write_recording
from bitproof.harness.capture.stored import StoredRecording
from bitproof.harness.case import Case, Chunking, Parallelism
from bitproof.harness.compare import evidence
from bitproof.harness.compare.verdict import compare
from bitproof.harness.records import Key, Manifest, Record, Recording, Verdict

NAMES = [("loss", "loss"), ("grad", "b"), ("grad", "a"), ("param", "a"), ("param", "b"), ("optimizer", "a.step")]
CASE = Case(
    name="tiny",
    family="hand_made",
    chunking=Chunking(dim="seq", modules="layers.*"),
    steps=3,
    parallelism=Parallelism(world_size=6, ep=1),
)
MANIFEST = Manifest(case=CASE.to_dict(), system="toy", steps=CASE.steps, world_size=6)


def rows(dtype="float32"):
    """Every record of the case, rank by rank; the ranks record alike."""
    return {
        Key(step, kind, name, rank): Record(
            f"{step}{rank}{number}".rjust(32, "0"), dtype, (2, 3), "0x1.8p+1" if kind == "loss" else None
        )
        for rank in range(6)
        for step in range(CASE.steps)
        for number, (kind, name) in enumerate(NAMES)
    }


def stored(folder, records):
    """As a run stores it: each rank's part, joined."""
    parts = [folder.with_suffix(f".{rank}") for rank in range(6)]
    for rank, part in enumerate(parts):
        write_part(part, [row for row in records.items() if row[0].rank == rank])
    join_parts(folder, MANIFEST, parts)
    return read_recording(folder)


@pytest.fixture
def long(monkeypatch):
    """Every recording is one of too many rows to be held."""
    monkeypatch.setattr(recording_files, "HELD_BYTES", 0)
    monkeypatch.setattr(stored_module, "KEPT_ROWS", 0)


@pytest.fixture(params=["short", "long"])
def either(request):
    """Recordings that are held in memory, and such as are read again rank by rank."""
    if request.param == "long":
        request.getfixturevalue("long")


def damage(records, random):
    """Records of which a few differ, lack, or are others."""
    for _ in range(random.randrange(4)):
        key = random.choice(list(records))
        record = records[key]
        match random.randrange(9):
            case 0:
                del records[key]
            case 1:
                records[key] = record._replace(dtype="bfloat16")
            case 2:
                records[key] = record._replace(placements="Shard(dim=0) of [8, 4] over [2]")
            case 3:
                records[key] = record._replace(content="zero")
            case 4 if key.kind == "loss":
                records[key] = record._replace(value="nan", digest="f" * 32)
            case 5:
                for other in [other for other in records if other.rank == key.rank]:
                    del records[other]
            case 6:
                for other in [other for other in records if other.rank == key.rank]:
                    records[other] = records[other]._replace(digest=f"{random.getrandbits(128):032x}")
            case 7:
                for other in [other for other in records if other.kind == key.kind and other.name == key.name]:
                    records[other] = records[other]._replace(content=random.choice(["zero", "nan"]))
            case _:
                records[key] = record._replace(digest=f"{random.getrandbits(128):032x}")
    if random.random() < 0.3:  # one side's ranks record in another order
        ordered = sorted(records.items(), key=lambda row: (row[0].rank, random.random()))
        records = dict(ordered)
    return records


def test_rank_by_rank_says_what_all_records_at_once_say(tmp_path, monkeypatch, either):
    found, reported = set(), set()
    for seed in range(12):
        choose = random.Random(seed)
        both = [damage(rows(), choose), damage(rows(), choose)]
        if choose.random() < 0.3:
            both[1] = damage(dict(both[0]), choose)
        sides = [stored(tmp_path / f"{number}", records) for number, records in enumerate(both)]
        assert all(isinstance(side, StoredRecording) and not side.holds_records for side in sides)
        for most in (20_000, 3):
            monkeypatch.setattr(evidence, "MAX_DIFFERING", most)
            comparison = compare(*sides, CASE)
            assert comparison == compare(*(Recording(MANIFEST, records) for records in both), CASE), (seed, most)
            assert not any(side.holds_records for side in sides), "nobody has asked for every record"
        found.add(comparison.verdict)
        reported.update(comparison.remarks)
    assert found == {Verdict.EQUAL, Verdict.DIFFERENT, Verdict.UNVERIFIED} and reported


def test_only_the_first_of_ranks_that_recorded_alike_is_looked_at_record_by_record(tmp_path, monkeypatch, either):
    looked = []
    add = evidence.Evidence.add
    monkeypatch.setattr(
        evidence.Evidence, "add", lambda self, ours, theirs: looked.append(ours) or add(self, ours, theirs)
    )
    other = rows() | {key: record._replace(shape=(7,)) for key, record in rows().items() if key.rank == 4}
    sides = [stored(tmp_path / f"{number}", other) for number in range(2)]
    assert compare(*sides, CASE).verdict == Verdict.EQUAL
    assert [next(iter(ours)).rank for ours in looked] == [0, 4]


def test_records_that_somebody_changed_count_and_not_the_file(tmp_path):
    sides = [stored(tmp_path / f"{number}", rows()) for number in range(2)]
    key = next(iter(sides[1].records))
    sides[1].records[key] = sides[1].records[key]._replace(digest="f" * 32)
    assert compare(*sides, CASE).verdict == Verdict.DIFFERENT


def test_a_recording_whose_rows_lie_otherwise_is_compared_as_a_whole(tmp_path):
    mixed = dict(sorted(rows().items(), key=lambda row: row[0].step))
    write_recording(tmp_path / "mixed", MANIFEST, mixed.items())
    side = read_recording(tmp_path / "mixed")
    assert not isinstance(side, StoredRecording) and list(side.records) == list(mixed)
    assert compare(side, stored(tmp_path / "by_rank", rows()), CASE).verdict == Verdict.EQUAL


def test_steps_of_a_stored_recording_are_taken_without_reading_all_of_it(tmp_path, either):
    whole, side = Recording(MANIFEST, rows()), stored(tmp_path / "stored", rows())
    for part in (lambda of: of.first_steps(2), lambda of: of.from_step(1), lambda of: of.from_step(0)):
        mine, theirs = part(side), part(whole)
        assert [mine.records_of(rank) for rank in range(6)] == [theirs.records_of(rank) for rank in range(6)]
        assert mine.manifest.steps == theirs.manifest.steps and not mine.holds_records
    assert not side.holds_records and side.first_steps(2).records == whole.first_steps(2).records
