from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.history import database
from bitproof.harness.history.database import add_runs, read_nights
from bitproof.harness.records import Divergence, Score, Throughput, Verdict
from tests.harness.reports import ENVIRONMENT, case, result, write_report

ROOT = Path(__file__).parents[3]


def run_id(day):
    return f"202601{day:02d}T030405Z-abcdef"


def night(tmp_path, day, *results, **facts):
    return write_report(tmp_path / "runs", results or [result(case())], run_id=run_id(day), **facts)


@pytest.fixture
def db(tmp_path):
    return tmp_path / "new" / "history.sqlite"


def test_nights_come_back_oldest_first_with_what_was_told(tmp_path, db):
    place = Divergence(step=1, rank=0, kind="grad", name="w")
    cases = [result(case("b"), "DIFFERENT", 2.5, first_divergence=place), result(case("a"), "ERROR")]
    assert add_runs(db, [night(tmp_path, 2, *cases, environment={"torch": "9"}), night(tmp_path, 1)]) == [
        (run_id(2), True),
        (run_id(1), True),
    ]
    first, second = read_nights(db, 10)
    assert (first.run_id, first.exit_status, first.environment) == (run_id(1), 0, ENVIRONMENT)
    assert (second.run_id, second.exit_status, second.environment) == (run_id(2), 3, {"torch": "9"})
    assert f"{second.time:%Y-%m-%d %H:%M:%S}" == "2026-01-02 03:04:05"
    assert list(second.outcomes) == ["b", "a"], "in the report's order"
    assert vars(second.outcomes["b"]) == {
        "name": "b",
        "family": "toys",
        "verdict": Verdict.DIFFERENT,
        "expected": "EQUAL",
        "as_expected": False,
        "seconds": 2.5,
        "compared": 856,
        "mismatched": 1,
        "first_divergence": "step 1, rank 0, grad w",
        "reference": "eager",
        "candidate": "graph",
        "throughput": {},
    }
    assert [entry.run_id for entry in read_nights(db, 1)] == [run_id(2)]


def test_a_run_added_twice_changes_nothing(tmp_path, db):
    folder = night(tmp_path, 1)
    add_runs(db, [folder])
    before = db.read_bytes()
    assert add_runs(db, [folder, folder]) == [(run_id(1), False)] * 2
    assert db.read_bytes() == before
    assert len(read_nights(db, 10)) == 1


def test_runs_are_added_all_or_none(tmp_path, db):
    good, bad = night(tmp_path, 1), night(tmp_path, 2, result(case(), seconds=1e308))
    values = (bad / "report.json").read_text().replace('"total": 1e+308', '"trace": 1e+308, "reference": 1e+308')
    (bad / "report.json").write_text(values)
    add_runs(db, [good])
    with pytest.raises(RecordingError) as error:
        add_runs(db, [night(tmp_path, 3), bad])
    assert str(error.value) == "RecordingError: the seconds of case near are damaged\n  expected: a finite number"
    assert [entry.run_id for entry in read_nights(db, 10)] == [run_id(1)]


def test_many_writers_wait_for_each_other(tmp_path, db):
    folders = [night(tmp_path, day) for day in range(1, 21)]
    db.parent.mkdir()
    failures = []

    def write(mine):
        try:
            for folder in mine:
                add_runs(db, [folder])
        except RecordingError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(folders[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(read_nights(db, 100)) == 20
    assert os.listdir(db.parent) == ["history.sqlite"], "one file is all there is to keep"


def test_a_writer_that_waits_in_vain_says_so(tmp_path, db, monkeypatch):
    folder = night(tmp_path, 1)
    add_runs(db, [folder])
    monkeypatch.setattr(database, "PATIENCE_SECONDS", 0.05)
    with sqlite3.connect(db, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RecordingError) as error:
            add_runs(db, [folder])
        other.rollback()
    assert str(error.value) == (
        f"RecordingError: the history cannot be used\n  found: database is locked\n  came from: {db}"
    )
    other.close()


def test_a_reader_does_not_wait_for_a_writer(tmp_path, db, monkeypatch):
    add_runs(db, [night(tmp_path, 1)])
    monkeypatch.setattr(database, "PATIENCE_SECONDS", 0.05)
    other = sqlite3.connect(db, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert len(read_nights(db, 10)) == 1
    other.rollback()
    other.close()


@pytest.mark.ranks
def test_a_writer_that_is_killed_leaves_the_file_as_it_was(tmp_path, db):
    add_runs(db, [night(tmp_path, 1)])
    cases = [result(case(f"case_{index}")) for index in range(150)]
    code = (
        "import os, signal, sys; from pathlib import Path; from bitproof.harness.history import database\n"
        "add = database._add\n"
        "def add_and_die(connection, report):\n"
        "    connection.execute('PRAGMA cache_size = 1')\n"  # so that pages reach the disk before the commit
        "    add(connection, report); os.kill(os.getpid(), signal.SIGKILL)\n"
        "database._add = add_and_die\n"
        "database.add_runs(Path(sys.argv[1]), [Path(sys.argv[2])])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(db), str(night(tmp_path, 2, *cases))], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert (db.parent / "history.sqlite-journal").exists(), "it died in the middle of writing"
    assert [entry.run_id for entry in read_nights(db, 10)] == [run_id(1)]
    add_runs(db, [night(tmp_path, 3)])
    assert [entry.run_id for entry in read_nights(db, 10)] == [run_id(1), run_id(3)]


def test_texts_are_never_part_of_a_statement(tmp_path, db):
    evil = "'); DROP TABLE runs; -- \ud800 \x00"
    place = Divergence(step=1, rank=0, kind="grad", name=evil)
    add_runs(db, [night(tmp_path, 1, result(case(), "DIFFERENT", first_divergence=place), environment={evil: evil})])
    [entry] = read_nights(db, 1)
    assert entry.environment == {evil: evil}
    assert entry.outcomes["near"].first_divergence == "step 1, rank 0, grad '); DROP TABLE runs; -- \\ud800 \x00"


@pytest.mark.parametrize("name", ["yesterday", "20260102T030405", "20261302T030405Z-abcdef"])
def test_a_run_that_does_not_tell_when_it_was_is_refused(tmp_path, db, name):
    folder = night(tmp_path, 1)
    values = json.loads((folder / "report.json").read_text()) | {"run_id": name}
    (folder / "report.json").write_text(json.dumps(values))
    with pytest.raises(RecordingError) as error:
        add_runs(db, [folder])
    assert str(error.value) == (
        f"RecordingError: a run's id does not begin with a time\n  expected: 20260102T030405Z-abcdef\n  found: {name!r}"
    )
    assert not db.exists()


def test_a_history_in_a_folder_that_cannot_be_is_a_wrong_call(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as error:
        add_runs(tmp_path / "file" / "nights" / "history.sqlite", [])
    assert str(error.value) == (
        "UsageError: the history's folder cannot be made\n"
        "  expected: --db FILE in a folder\n"
        f"  found: Not a directory: {tmp_path / 'file' / 'nights' / 'history.sqlite'}"
    )


def test_a_missing_history_is_a_wrong_call(tmp_path):
    with pytest.raises(UsageError) as error:
        read_nights(tmp_path / "gone.sqlite", 1)
    assert str(error.value) == (
        "UsageError: there is no such history\n"
        "  expected: a file that `bitproof history add` made\n"
        f"  found: {tmp_path / 'gone.sqlite'}"
    )


SCORE = Score(faults=3, killed=3, equivalents=2, places=(2, 3), seconds=1.5)
OF_THE_FIRST_SCHEMA = ("DROP TABLE details", "DROP TABLE scores", "PRAGMA user_version = 1")
OF_THE_SECOND = ("DROP TABLE details", "PRAGMA user_version = 2")


def test_what_came_of_faults_comes_back(tmp_path, db):
    add_runs(db, [night(tmp_path, 1), night(tmp_path, 2, faults=SCORE)])
    assert [entry.score for entry in read_nights(db, 10)] == [None, SCORE]


def test_a_history_from_before_scores_is_read_as_it_is_and_grows_when_a_run_is_added(tmp_path, db):
    add_runs(db, [night(tmp_path, 1)])
    changed(db, *OF_THE_FIRST_SCHEMA)
    before = db.read_bytes()
    assert [entry.score for entry in read_nights(db, 10)] == [None]
    assert db.read_bytes() == before
    add_runs(db, [night(tmp_path, 2, faults=SCORE)])
    assert [entry.score for entry in read_nights(db, 10)] == [None, SCORE]


def test_systems_and_throughput_come_back_and_are_not_known_of_an_older_history(tmp_path, db):
    speed = Throughput(steps=2, step_seconds=0.5, spread_seconds=0.1, tokens=100, flops=10**9, peak_flops=1e10)
    add_runs(db, [night(tmp_path, 1, result(case(), throughput={"candidate": speed}))])
    [found] = read_nights(db, 10)[0].outcomes.values()
    assert (found.reference, found.candidate, found.throughput) == ("eager", "graph", {"candidate": speed})
    changed(db, *OF_THE_SECOND)
    [found] = read_nights(db, 10)[0].outcomes.values()
    assert (found.reference, found.throughput) == (None, {})
    add_runs(db, [night(tmp_path, 2)])
    assert [each.outcomes["near"].candidate for each in read_nights(db, 10)] == [None, "graph"]


@pytest.mark.parametrize("text", ["[]", '{"other": {}}', '{"candidate": {"steps": -1}}', "{", '{"candidate": 1}'])
def test_a_throughput_that_no_run_has_is_refused(tmp_path, db, text):
    add_runs(db, [night(tmp_path, 1)])
    changed(db, f"UPDATE details SET throughput = '{text}'")
    assert refusal(db).startswith("RecordingError: a night of the history is damaged")


def refusal(path):
    with pytest.raises(RecordingError) as error:
        read_nights(path, 10)
    return str(error.value)


def test_what_is_no_sqlite_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "file"
    path.write_text("not a database " * 100)
    for call in (lambda: refusal(path), lambda: add_runs(path, [night(tmp_path, 1)])):
        try:
            text = call()
        except RecordingError as error:
            text = str(error)
        assert text == (
            f"RecordingError: the history cannot be used\n  found: file is not a database\n  came from: {path}"
        )
    assert path.read_text() == "not a database " * 100


def changed(db, *statements):
    with sqlite3.connect(db) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_a_newer_history_is_refused(tmp_path, db):
    add_runs(db, [night(tmp_path, 1)])
    changed(db, "PRAGMA user_version = 4")
    assert refusal(db) == (
        "RecordingError: the history is of a newer bitproof\n"
        "  expected: schema 3 or lower\n"
        "  found: schema 4\n"
        f"  came from: {db}\n"
        "  fix: use the bitproof that wrote it, or another file"
    )


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("CREATE TABLE more (a)", "5 tables, views, indexes or triggers, schema 3"),
        ("CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM results; END", "5 tables, "),
        ("CREATE VIEW v AS SELECT 1", "5 tables, "),
        ("CREATE INDEX i ON results (name)", "5 tables, "),
        ("ALTER TABLE runs ADD COLUMN evil", "4 tables, "),
        ("DROP TABLE runs", "3 tables, "),
        ("DROP TABLE scores", "3 tables, views, indexes or triggers, schema 3"),
        ("DROP TABLE details", "3 tables, views, indexes or triggers, schema 3"),
        ("PRAGMA user_version = 1", "4 tables, views, indexes or triggers, schema 1"),
        ("PRAGMA user_version = 0", "4 tables, views, indexes or triggers, schema 0"),
    ],
)
def test_other_tables_are_refused_before_anything_is_read_or_written(tmp_path, db, statement, found):
    add_runs(db, [night(tmp_path, 1)])
    changed(db, statement)
    before = db.read_bytes()
    text = refusal(db)
    assert text.startswith(
        "RecordingError: the file is no history of bitproof\n  expected: the tables runs, results, details and scores"
    )
    assert f"\n  found: {found}" in text
    with pytest.raises(RecordingError, match="the file is no history of bitproof"):
        add_runs(db, [night(tmp_path, 2)])
    assert db.read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE results SET verdict = 'FINE'",
        "UPDATE results SET name = '<script>'",
        "UPDATE results SET seconds = -1.0",
        "UPDATE results SET seconds = 9e999",
        "UPDATE results SET seconds = 'long'",
        "UPDATE results SET compared = x'00'",
        "UPDATE results SET as_expected = 'yes'",
        "UPDATE runs SET environment = '[1]'",
        "UPDATE runs SET environment = '{'",
        "UPDATE runs SET exit_status = 'fine'",
        "UPDATE scores SET score = '{'",
        "UPDATE scores SET score = '[]'",
        "UPDATE scores SET score = x'00'",
        'UPDATE scores SET score = \'{"faults": 1, "killed": 2}\'',
        "UPDATE scores SET score = '{\"faults\": -1}'",
    ],
)
def test_values_that_no_run_has_are_refused(tmp_path, db, statement):
    add_runs(db, [night(tmp_path, 1, faults=SCORE)])
    changed(db, statement)
    assert refusal(db).startswith(f"RecordingError: a night of the history is damaged\n  found: '{run_id(1)}': ")


@pytest.mark.parametrize("text", [b"exit_status INTEGER", b"toys"], ids=["schema", "value"])
def test_text_that_is_none_is_refused(tmp_path, db, text):
    add_runs(db, [night(tmp_path, 1)])
    content = db.read_bytes()
    assert text in content
    db.write_bytes(content.replace(text, b"\x9a" + text[1:]))
    assert refusal(db).startswith("RecordingError: the history cannot be used\n  found: ")


def test_a_damaged_page_is_refused(tmp_path, db):
    add_runs(db, [night(tmp_path, 1, *[result(case(f"case_{index}")) for index in range(200)])])
    content = bytearray(db.read_bytes())
    content[8192:] = b"\xff" * (len(content) - 8192)
    db.write_bytes(content)
    assert refusal(db).startswith("RecordingError: the history cannot be used\n  found: ")
