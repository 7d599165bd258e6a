"""The history's file: SQLite, with a row a run, two rows a result, and a row for the faults that a run was given.

A run is added in one transaction, so a writer that is killed leaves the file as it was, and others wait for
their turn. There is no write-ahead log: a CI system keeps one file, not three. Nothing in a file is taken on
trust: its schema must be ours to the letter, which leaves no room for triggers and views, and values are checked.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.files.plain_files import check_plain
from bitproof.harness.history.beside import read_run
from bitproof.harness.records import ROLES, CaseResult, Report, Score, Throughput, Verdict
from bitproof.harness.report import text
from bitproof.harness.validate import parse, read

SCHEMA = 3
PATIENCE_SECONDS = 30.0
MAX_ROWS = 1_000_000
_FIRST_TABLES = (
    "CREATE TABLE runs (run_id TEXT PRIMARY KEY, exit_status INTEGER NOT NULL, environment TEXT NOT NULL)",
    "CREATE TABLE results (run_id TEXT NOT NULL, name TEXT NOT NULL, family TEXT NOT NULL, verdict TEXT NOT NULL, "
    "expected TEXT NOT NULL, as_expected INTEGER NOT NULL, seconds REAL NOT NULL, compared INTEGER NOT NULL, "
    "mismatched INTEGER NOT NULL, first_divergence TEXT NOT NULL, PRIMARY KEY (run_id, name))",
)
_SCORES = "CREATE TABLE scores (run_id TEXT PRIMARY KEY, score TEXT NOT NULL)"
_DETAILS = (
    "CREATE TABLE details (run_id TEXT NOT NULL, name TEXT NOT NULL, reference TEXT NOT NULL, candidate TEXT NOT NULL, "
    "throughput TEXT NOT NULL, PRIMARY KEY (run_id, name))"
)
_TABLES: dict[int, tuple[str, ...]] = {
    0: (),
    1: _FIRST_TABLES,
    2: (*_FIRST_TABLES, _SCORES),
    SCHEMA: (*_FIRST_TABLES, _SCORES, _DETAILS),
}
"""By schema, 0 for an empty file. An older one is still read, and gets the tables it lacks when a run is added."""


@dataclass(frozen=True)
class Outcome:
    """A case's result of one night; systems and throughput are not known of an older bitproof's nights."""

    name: str
    family: str
    verdict: Verdict
    expected: str
    as_expected: bool
    seconds: float
    compared: int
    mismatched: int
    first_divergence: str
    reference: str | None = None
    candidate: str | None = None
    throughput: dict[str, Throughput] = field(default_factory=dict)


@dataclass(frozen=True)
class Night:
    """One run: its time in UTC, its machine, and each case's result, in the report's order.

    `score` is that of its injected faults, if any.
    """

    run_id: str
    exit_status: int
    environment: dict[str, Any]
    outcomes: dict[str, Outcome]
    score: Score | None = None

    @property
    def time(self) -> datetime:
        """When the run began."""
        return _time_of(self.run_id)


def add_runs(path: Path, run_dirs: Sequence[Path]) -> list[tuple[str, bool]]:
    """Add runs to the history at `path`, all or none; returns each run's id and whether it is new there.

    Raises RecordingError for a report that cannot be read, or a file that is no history, and UsageError for one whose
    folder cannot be made.
    """
    reports = [_read_report(run_dir) for run_dir in run_dirs]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "the history's folder cannot be made", expected="--db FILE in a folder", found=f"{error.strerror}: {path}"
        ) from error
    with _opened(path, writes=True) as connection:
        return [(report.run_id, _add(connection, report)) for report in reports]


def read_nights(path: Path, last: int) -> list[Night]:
    """The newest `last` nights of the history at `path`, oldest first.

    Raises UsageError where there is no file, and RecordingError for one that is no history, or is damaged.
    """
    if not path.is_file():
        raise UsageError(
            "there is no such history", expected="a file that `bitproof history add` made", found=str(path)
        )
    with _opened(path, writes=False) as connection:
        runs = connection.execute("SELECT * FROM runs ORDER BY run_id DESC LIMIT ?", (last,)).fetchall()
        schema = _schema_of(connection)
        scores = dict(connection.execute("SELECT * FROM scores LIMIT ?", (MAX_ROWS,))) if schema > 1 else {}
        return [
            _night(connection, *columns, score=scores.get(columns[0]), has_details=schema > 2)
            for columns in reversed(runs)
        ]


def _read_report(run_dir: Path) -> Report:
    report = read_run(run_dir)
    _time_of(report.run_id)
    return report


def _add(connection: sqlite3.Connection, report: Report) -> bool:
    """Add one run; nothing where it is already there."""
    environment = json.dumps(report.environment)
    done = connection.execute(
        "INSERT OR IGNORE INTO runs VALUES (?, ?, ?)", (report.run_id, report.exit_status, environment)
    )
    if not done.rowcount:
        return False
    rows = [(report.run_id, *_row(result)) for result in report.cases]
    connection.executemany(f"INSERT INTO results VALUES ({', '.join('?' * 10)})", rows)
    details = [(report.run_id, *_details_of(result)) for result in report.cases]
    connection.executemany("INSERT INTO details VALUES (?, ?, ?, ?, ?)", details)
    if report.faults is not None:
        score = json.dumps(dataclasses.asdict(report.faults), allow_nan=False)
        connection.execute("INSERT INTO scores VALUES (?, ?)", (report.run_id, score))
    return True


def _row(result: CaseResult) -> tuple[Any, ...]:
    """A result's columns. What UTF-8 cannot hold is spelled out."""
    family, place = (
        value.encode(errors="backslashreplace").decode()
        for value in (result.case.family, text.locate(result.first_divergence))
    )
    try:
        seconds = text.total_seconds(result)
    except OverflowError:
        seconds = math.inf
    if not 0 <= seconds < math.inf:
        raise RecordingError(f"the seconds of case {result.case.name} are damaged", expected="a finite number")
    counts = (min(sum(counts.values()), 2**62) for counts in (result.compared, result.mismatched))
    return (
        result.case.name,
        family,
        result.verdict.value,
        result.case.expected,
        int(result.as_expected),
        seconds,
        *counts,
        place,
    )


def _details_of(result: CaseResult) -> tuple[str, str, str, str]:
    """What a case compared, and how fast it was, as columns. What UTF-8 cannot hold is spelled out."""
    case = result.case
    throughput = json.dumps({side: dataclasses.asdict(found) for side, found in result.throughput.items()})
    systems = (each.encode(errors="backslashreplace").decode() for each in (case.reference, case.candidate))
    return case.name, *systems, throughput  # type: ignore[return-value]


def _night(
    connection: sqlite3.Connection,
    run_id: Any,
    exit_status: Any,
    environment: Any,
    *,
    score: Any,
    has_details: bool,
) -> Night:
    """A night from its rows. Raises RecordingError for values that no run has."""
    rows = connection.execute("SELECT * FROM results WHERE run_id = ? ORDER BY rowid LIMIT ?", (run_id, MAX_ROWS))
    query = "SELECT name, reference, candidate, throughput FROM details WHERE run_id = ? LIMIT ?"
    try:
        details = {row[0]: row[1:] for row in connection.execute(query, (run_id, MAX_ROWS))} if has_details else {}
        outcomes = [_detailed(_outcome(*row[1:]), *details.get(row[1], ())) for row in rows]
        environment = json.loads(environment)
        if type(exit_status) is not int or not isinstance(environment, dict) or not isinstance(run_id, str):
            raise ValueError("a run's columns have other types")
        found = None if score is None else read(Score, parse(score), "score", RecordingError, damaged="is damaged")
        if found and found.overfull:
            raise ValueError(f"of {found.overfull.whole} {found.overfull.name} cannot be {found.overfull.part}")
    except (ValueError, TypeError, RecursionError, RecordingError) as error:
        raise RecordingError("a night of the history is damaged", found=f"{run_id!r:.80}: {error!s:.200}") from error
    night = Night(run_id, exit_status, environment, {outcome.name: outcome for outcome in outcomes}, found)
    _time_of(run_id)
    return night


def _outcome(*columns: Any) -> Outcome:
    wanted = (str, str, str, str, int, float, int, int, str)
    if tuple(map(type, columns)) != wanted or not 0 <= columns[5] < math.inf:
        raise ValueError(f"a result's columns have other types or ranges: {columns!r:.100}")
    name, family, verdict, expected, as_expected, *rest = columns
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"{name!r:.100} is no case's name")
    return Outcome(name, family, Verdict(verdict), expected, bool(as_expected), *rest)


def _detailed(outcome: Outcome, *columns: Any) -> Outcome:
    """An outcome with its systems and their throughput, where the history has them."""
    if not columns:
        return outcome
    if not all(isinstance(column, str) for column in columns):
        raise ValueError(f"a result's details have other types: {columns!r:.100}")
    reference, candidate, text_of_sides = columns
    sides = parse(text_of_sides)
    if not isinstance(sides, dict) or not sides.keys() <= {*ROLES}:
        raise ValueError(f"{text_of_sides!r:.100} is no throughput of two sides")
    found = {
        side: read(Throughput, each, "throughput", RecordingError, damaged="is damaged") for side, each in sides.items()
    }
    return replace(outcome, reference=reference, candidate=candidate, throughput=found)


@contextmanager
def _opened(path: Path, *, writes: bool) -> Iterator[sqlite3.Connection]:
    """A connection within one transaction, which an error or the end of the process undoes.

    Readers do not open the file for reading only: the first to come after a writer was killed rolls its work back.
    """
    try:
        if os.path.lexists(path) or not writes:
            check_plain(path)
        uri = f"{path.absolute().as_uri()}?mode={'rwc' if writes else 'rw'}"
        with closing(sqlite3.connect(uri, uri=True, timeout=PATIENCE_SECONDS, isolation_level=None)) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            _check_schema(connection, path, writes=writes)
            yield connection
            connection.execute("COMMIT")
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordingError("the history cannot be used", found=reason, where=str(path)) from error
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise RecordingError("the history cannot be used", found=str(error), where=str(path)) from error


def _schema_of(connection: sqlite3.Connection) -> int:
    [[version]] = connection.execute("PRAGMA user_version")
    return int(version)


def _check_schema(connection: sqlite3.Connection, path: Path, *, writes: bool) -> None:
    """Give a new file our tables, and an older one those that it lacks; refuse one that has others."""
    version = _schema_of(connection)
    found = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")}
    if version > SCHEMA:
        raise RecordingError(
            "the history is of a newer bitproof",
            expected=f"schema {SCHEMA} or lower",
            found=f"schema {version}",
            where=str(path),
            fix="use the bitproof that wrote it, or another file",
        )
    if found != set(_TABLES.get(version, ())):
        raise RecordingError(
            "the file is no history of bitproof",
            expected="the tables runs, results, details and scores of `bitproof history add`, and nothing else",
            found=f"{len(found)} tables, views, indexes or triggers, schema {version}",
            where=str(path),
            fix="choose another file with --db",
        )
    if version < SCHEMA and (writes or not found):
        for table in _TABLES[SCHEMA]:
            if table not in found:
                connection.execute(table)
        connection.execute(f"PRAGMA user_version = {SCHEMA:d}")


def _time_of(run_id: str) -> datetime:
    """When a run began, by its id. Raises RecordingError for an id that `bitproof run` did not make."""
    try:
        if not re.fullmatch(r"[\w-]{16,64}", run_id, re.ASCII):
            raise ValueError
        return datetime.strptime(run_id[:16], "%Y%m%dT%H%M%SZ")
    except ValueError:
        raise RecordingError(
            "a run's id does not begin with a time",
            expected="20260102T030405Z-abcdef",
            found=repr(run_id)[:100],
        ) from None
