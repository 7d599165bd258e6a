from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import pytest

from bitproof.harness.cli import main
from bitproof.harness.history.database import read_nights
from bitproof.harness.history.show import print_trends
from bitproof.harness.history.trends import trends_of
from bitproof.harness.records import Score, Throughput
from tests.harness.reports import ENVIRONMENT, case, result, write_report

SPEED = Throughput(steps=2, step_seconds=0.5, spread_seconds=0.1, tokens=100, flops=10**9, peak_flops=1e10)


@pytest.fixture
def runs(tmp_path):
    days = [("EQUAL", 10.0, "3.11"), ("DIFFERENT", 10.0, "3.12"), ("EQUAL", 15.0, "3.12")]
    return [
        str(
            write_report(
                tmp_path / "runs",
                [result(case("near"), verdict, seconds, throughput={"candidate": SPEED}), result(case("far"))],
                run_id=f"2026010{day}T030405Z-abcdef",
                environment=ENVIRONMENT | {"python": python, "commit": "c0ffee1" + str(day) * 33},
            )
        )
        for day, (verdict, seconds, python) in enumerate(days, 1)
    ]


def test_a_night_needs_one_line_to_add_and_one_to_show(runs, tmp_path, capsys):
    db = str(tmp_path / "new" / "history.sqlite")
    assert main(["history", "add", *runs[:2], "--db", db]) == 0
    assert main(["history", "add", *runs[1:], "--db", db]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"20260101T030405Z-abcdef added to {db}",
        f"20260102T030405Z-abcdef added to {db}",
        f"20260102T030405Z-abcdef was already in {db}",
        f"20260103T030405Z-abcdef added to {db}",
    ]
    plot = tmp_path / "plot.svg"
    assert main(["history", "show", "--db", db, "-k", "near", "--last", "2", "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 nights, 2026-01-02 to 2026-01-03"
    [row] = [line.split() for line in lines if line.strip().startswith("near")]
    assert row[:4] == ["near", "EQUAL", "EQUAL", "2026-01-03"] and row[4] == "c0ffee1"
    assert row[5:] == ["2", "50%", "100%", "0%", "15.0", "10.0", "x", "1.50", "500.0", "ms", "200", "20.0%"]
    assert plot.is_file()


def test_the_table_tells_what_changed_and_what_its_columns_mean(runs, tmp_path, capsys):
    main(["history", "add", *runs, "--db", str(tmp_path / "db")])
    nights = read_nights(tmp_path / "db", 30)
    stream = io.StringIO()
    print_trends(nights, trends_of(nights), stream)
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines[4:6]] == ["near", "far"]
    assert lines[7:] == [
        "2026-01-02: python 3.11 -> 3.12",
        "since: the first night of the current result",
        "flake rate: share of nights, after a case's first, on which its result is another than the night before",
        "unsure: share of nights on which it was NONDETERMINISTIC, UNVERIFIED or ERROR",
        "slower: last seconds over the median of the nights before",
    ]


def test_two_results_of_one_commit_in_one_environment_are_told_as_flaky_with_both_runs(tmp_path, capsys):
    environment = ENVIRONMENT | {"commit": "c0ffee"}
    for day, verdict in enumerate(("EQUAL", "DIFFERENT", "EQUAL"), 1):
        results = [result(case("near"), verdict), result(case("far"))]
        write_report(tmp_path / "runs", results, run_id=f"2026010{day}T030405Z-abcdef", environment=environment)
    main(["history", "add", *map(str, sorted((tmp_path / "runs").iterdir())), "--db", str(tmp_path / "db")])
    assert main(["history", "show", "--db", str(tmp_path / "db")]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FLAKY")]
    assert told == [
        "FLAKY near: DIFFERENT in 20260102T030405Z-abcdef and EQUAL in 20260103T030405Z-abcdef, "
        "of one commit, machine and versions"
    ]


def test_json_has_every_figure(runs, tmp_path, capsys):
    db = str(tmp_path / "db")
    main(["history", "add", *runs, "--db", db])
    capsys.readouterr()
    assert main(["history", "show", "--db", db, "--json", "-k", "near"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [night["exit_status"] for night in values["nights"]] == [0, 1, 0]
    assert values["changes"] == [
        {"run_id": "20260102T030405Z-abcdef", "what": "python", "before": "3.11", "after": "3.12"}
    ]
    assert values["cases"] == [
        {
            "name": "near",
            "family": "toys",
            "verdict": "EQUAL",
            "expected": "EQUAL",
            "last_as_expected": True,
            "first_divergence": None,
            "nights": 3,
            "as_expected": pytest.approx(2 / 3),
            "flake_rate": 1,
            "flaky": None,
            "unsure": 0,
            "since": "20260103T030405Z-abcdef",
            "seconds": 15.0,
            "median_seconds": 10.0,
            "slower": 1.5,
            "verdicts": ["EQUAL", "DIFFERENT", "EQUAL"],
            "seconds_by_night": [10.0, 10.0, 15.0],
            "label": "near",
            "reference": "eager",
            "candidate": "graph",
            "environment": {"systems": "eager / graph", "device": "cpu", "backend": "gloo"}
            | {name: ENVIRONMENT[name] for name in ("torch", "cpu")},
            "throughput": {"candidate": asdict(SPEED)},
            "step_seconds_by_night": [0.5] * 3,
            "tokens_per_second_by_night": [200.0] * 3,
            "mfu_by_night": [0.2] * 3,
            "commits": ["c0ffee1" + str(day) * 33 for day in (1, 2, 3)],
        }
    ]


def test_what_came_of_faults_is_told_of_the_newest_night_that_has_them_and_where_it_changed(tmp_path, capsys):
    clean = Score(faults=3, killed=3, equivalents=2, places=(3, 3))
    scores = {1: clean, 2: None, 3: replace(clean, killed=2, places=(2, 2)), 4: None}
    folders = [
        write_report(tmp_path / "runs", [result(case())], run_id=f"2026010{day}T030405Z-abcdef", faults=score)
        for day, score in scores.items()
    ]
    db = str(tmp_path / "history.sqlite")
    assert main(["history", "add", *map(str, folders), "--db", db]) == 0
    assert main(["history", "show", "--db", db]) == 0
    told = capsys.readouterr().out
    assert "\nfaults, 2026-01-03: 2 of 3 faults killed, 0 of 2 equivalents flagged, " in told
    assert "\n2026-01-03: faults killed 3 of 3 -> 2 of 3\n" in told
    assert "\n2026-01-03: blame right in module and direction 3 of 3 -> 2 of 2\n" in told
    assert "equivalents flagged 0" not in told
    assert main(["history", "show", "--db", db, "--json"]) == 0
    nights = json.loads(capsys.readouterr().out)["nights"]
    assert [night["faults"] and night["faults"]["killed"] for night in nights] == [3, None, 2, None]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["show", "--db", "no/such.sqlite"], 2, "UsageError: there is no such history"),
        (["show", "--last", "0"], 2, "Invalid value for '--last'"),
        (["show", "--db", "pyproject.toml"], 3, "RecordingError: the history cannot be used"),
        (["add", "no/such/run"], 3, "\n  came from: no/such/run/report.json\n"),
        (["add"], 2, "Missing argument 'RUN_DIR...'"),
    ],
)
def test_a_wrong_call_is_told(arguments, status, text, capsys):
    assert main(["history", *arguments]) == status
    assert text in capsys.readouterr().err
