from __future__ import annotations

import json
import os
import shutil

import pytest

from bitproof.harness.cli import main
from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.powers.merge.merge_command import merge
from bitproof.harness.records import Score, Verdict
from bitproof.harness.report import json as report_json
from bitproof.harness.report.text import replay_command
from tests.harness.reports import ENVIRONMENT, case, result, write_report, write_shard

SELECTION = [case(name) for name in ("a", "b", "c", "d")]  # a and c go to the first of two shards


def merged(report_dir):
    return report_json.read(report_dir / "latest" / "report.json")


@pytest.fixture
def shards(tmp_path):
    """Two shards of one run, with what their cases left behind."""
    folders = [write_shard(tmp_path, index, 2, SELECTION, options=("--steps", "2")) for index in (1, 2)]
    for folder, names in zip(folders, ("ac", "bd"), strict=True):
        for name in names:
            (folder / "logs" / name / "graph").mkdir(parents=True)
            (folder / "logs" / name / "graph" / "rank0.log").write_text(f"log of {name}")
        (folder / "logs" / "host.log").write_text(f"host of {names}")
        (folder / "graphs" / f"{names[0]}.reference").mkdir(parents=True)
        (folder / "graphs" / f"{names[0]}.reference" / "00-trace.txt").write_text("graph")
    return folders


def test_shards_become_one_run_in_the_order_of_the_selection(shards, tmp_path, capsys):
    out = tmp_path / "merged"
    assert merge(list(reversed(shards)), out) == 0
    report = merged(out)
    assert [entry.case.name for entry in report.cases] == ["a", "b", "c", "d"]
    assert {entry.verdict for entry in report.cases} == {Verdict.EQUAL}
    assert (report.shard, report.options, report.environment) == (None, ("--steps", "2"), ENVIRONMENT)
    run_dir = out / report.run_id
    assert {"graphs", "logs", "report.json", "report.md", "junit.xml"} <= set(os.listdir(run_dir))
    assert (run_dir / "logs" / "d" / "graph" / "rank0.log").read_text() == "log of d"
    assert (run_dir / "logs" / "shard-2" / "host.log").read_text() == "host of bd"
    assert (run_dir / "graphs" / "a.reference" / "00-trace.txt").is_file()
    printed, reported = capsys.readouterr()
    assert printed.endswith(f"report: {run_dir / 'report.md'}\n") and "4 EQUAL" in printed
    assert reported == ""


def test_the_worst_shard_decides(tmp_path):
    different = {"b": "DIFFERENT"}
    for name, verdicts, status in (("x", different, 1), ("y", different | {"c": "ERROR"}, 3)):
        folders = [write_shard(tmp_path / name, index, 2, SELECTION, verdicts=verdicts) for index in (1, 2)]
        assert merge(folders, tmp_path / name) == status == merged(tmp_path / name).exit_status
    wrong = write_shard(tmp_path / "z", 1, 2, SELECTION, status=2)
    assert merge([wrong, folders[1]], tmp_path / "z") == 2


def test_the_cases_of_a_missing_shard_are_unverified(shards, tmp_path, capsys):
    (shards[1] / "report.json").write_text("{")
    assert merge(shards, tmp_path / "merged") == 3
    report = merged(tmp_path / "merged")
    reason = "no shard has a result for this case; missing shards: 2/2"
    assert [(entry.case.name, entry.verdict.value, entry.error) for entry in report.cases] == [
        ("a", "EQUAL", None),
        ("b", "UNVERIFIED", reason),
        ("c", "EQUAL", None),
        ("d", "UNVERIFIED", reason),
    ]
    reported = capsys.readouterr().err
    assert reported.startswith(f"bitproof: {shards[1]} counts as missing\nRecordingError: a report is not JSON\n")
    assert reported.endswith("bitproof: missing shards: 2/2\n")


def test_a_case_that_its_shard_forgot_is_unverified(tmp_path):
    folders = [write_shard(tmp_path, index, 2, SELECTION) for index in (1, 2)]
    values = json.loads((folders[0] / "report.json").read_text())
    del values["cases"][1]
    (folders[0] / "report.json").write_text(json.dumps(values))
    assert merge(folders, tmp_path / "merged") == 3
    lost = merged(tmp_path / "merged").cases[2]
    assert (lost.case.name, lost.verdict, lost.error) == (
        "c",
        Verdict.UNVERIFIED,
        "no shard has a result for this case",
    )


def test_an_empty_shard_and_cases_that_a_machine_cannot_judge_belong_to_the_whole(tmp_path):
    selection = [case("a"), case("b", requires="cuda")]
    folders = [
        write_shard(tmp_path, index, 3, selection, not_run={"b": "no GPU"} if index == 2 else {}) for index in (1, 2, 3)
    ]
    assert [report_json.read(folder / "report.json").exit_status for folder in folders] == [0, 0, 0]
    assert merge(folders, tmp_path / "merged") == 0
    report = merged(tmp_path / "merged")
    assert ([entry.case.name for entry in report.cases], report.not_run) == (["a"], {"b": "no GPU"})


def test_what_machines_and_options_say_differently_is_reported_and_kept_by_shard(tmp_path, capsys):
    first = write_shard(tmp_path, 1, 2, SELECTION)
    second = write_shard(tmp_path, 2, 2, SELECTION, environment=ENVIRONMENT | {"torch": "2.12.0"}, options=("-x",))
    assert merge([first, second], tmp_path / "merged") == 0
    report = merged(tmp_path / "merged")
    assert report.environment == ENVIRONMENT | {"torch": {"1/2": "2.13.0", "2/2": "2.12.0"}}
    assert [replay_command(report, entry) for entry in report.cases[:2]] == [
        "bitproof run -k a",
        "bitproof run -k b -x",
    ]
    assert capsys.readouterr().err == (
        "bitproof: shards differ in options: [] in 1/2, ['-x'] in 2/2\n"
        "bitproof: shards differ in torch: 2.13.0 in 1/2, 2.12.0 in 2/2\n"
    )


def refused(folders, tmp_path):
    with pytest.raises((UsageError, RecordingError)) as error:
        merge(folders, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    return str(error.value)


def test_one_shard_twice_is_refused(shards, tmp_path):
    again = write_shard(tmp_path / "again", 1, 2, SELECTION)
    for pair in ([shards[0], shards[0]], [shards[0], again]):
        assert refused(pair, tmp_path) == (
            "UsageError: shard 1/2 is there twice\n"
            "  expected: each shard once\n"
            f"  found: {pair[0]} and {pair[1]}\n"
            "  fix: leave out one of them"
        )


def test_shards_of_other_runs_are_refused(shards, tmp_path):
    fix = "  fix: give every shard the same -k, --steps, --world-size and other changes to its cases"
    others = [
        (write_shard(tmp_path / "x", 2, 3, SELECTION), "3 shards of a, b, c and 1 more cases"),
        (write_shard(tmp_path / "y", 2, 2, SELECTION[:2]), "2 shards of a, b"),
        (
            write_shard(tmp_path / "z", 2, 2, [case(name, steps=4) for name in "abcd"]),
            "2 shards of a, b, c and 1 more cases",
        ),
    ]
    for other, found in others:
        assert refused([shards[0], other], tmp_path) == (
            "UsageError: these are not shards of one run\n"
            f"  expected: 2 shards of a, b, c and 1 more cases as in {shards[0]}\n"
            f"  found: {found} in {other}\n{fix}"
        )


def test_a_whole_run_is_no_shard(tmp_path):
    whole = write_report(tmp_path, [result(case())])
    assert refused([whole], tmp_path) == (
        f"UsageError: {whole} holds a whole run, not a shard\n"
        "  expected: folders that `bitproof run --shard i/n` made\n"
        "  found: a report without a shard"
    )


def test_a_run_of_faults_beside_the_shards_is_reported_and_counts(shards, tmp_path, capsys):
    clean, survived = Score(faults=2, killed=2), Score(faults=2, killed=1)
    for score, status in ((clean, 0), (survived, 1)):
        folder = tmp_path / f"faults{status}"
        measured = write_report(folder, [result(case("d", steps=1))], faults=score)
        assert merge([*shards, measured], folder) == status == merged(folder).exit_status
        report = merged(folder)
        assert (report.faults, [entry.case.steps for entry in report.cases]) == (score, [2, 2, 2, 2])
        assert "2 faults killed" in (folder / "latest" / "report.md").read_text()
        assert "2 faults killed" in capsys.readouterr().out


def test_faults_alone_are_no_night_and_two_runs_of_them_are_one_too_many(shards, tmp_path):
    one, two = (write_report(tmp_path / name, [result(case())], faults=Score(faults=1, killed=1)) for name in "xy")
    assert refused([one], tmp_path).startswith("RecordingError: ")
    assert refused([*shards, one, two], tmp_path) == (
        "UsageError: more than one run of faults\n"
        "  expected: at most one folder that `bitproof faults` made\n"
        f"  found: {one} and {two}\n"
        "  fix: leave out all but one of them"
    )


def tamper(folder, change):
    values = json.loads((folder / "report.json").read_text())
    change(values)
    (folder / "report.json").write_text(json.dumps(values))


def test_two_results_for_a_case_are_refused(shards, tmp_path):
    theirs = json.loads((shards[0] / "report.json").read_text())["cases"][0]
    tamper(shards[1], lambda values: values["cases"].append(theirs))
    assert refused(shards, tmp_path) == (
        "RecordingError: more than one result for case a\n"
        "  expected: one\n"
        f"  found: {shards[0]} and {shards[1]} have one"
    )


def test_a_result_for_what_was_not_selected_is_refused(shards, tmp_path):
    def rename(values):
        values["cases"][0]["name"] = values["cases"][0]["case"]["name"] = "other"

    def shorten(values):
        values["cases"][0]["case"]["seed"] = 1

    tamper(shards[1], shorten)
    assert refused(shards, tmp_path) == (
        "RecordingError: case b is not the one that was selected\n"
        f"  found: {shards[1]} has a result for another case of this name"
    )
    tamper(shards[1], rename)
    assert refused(shards, tmp_path) == (
        f"RecordingError: case other was not selected\n  found: {shards[1]} has a result for it"
    )


def test_no_report_at_all_is_an_error_that_ends_with_3(tmp_path, capsys):
    assert main(["merge", str(tmp_path / "gone"), "--report-dir", str(tmp_path / "merged")]) == 3
    assert f"\n  found: {tmp_path / 'gone'}\n" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_links_that_lead_out_of_a_run_are_left_behind(shards, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (shards[0] / "logs" / "a" / "link").symlink_to(tmp_path / "secret")
    (shards[0] / "logs" / "link").symlink_to(tmp_path / "secret")
    (shards[0] / "recordings").mkdir()
    (shards[0] / "recordings" / "c").symlink_to(tmp_path)
    assert merge(shards, tmp_path / "merged") == 0
    left = [path for path in (tmp_path / "merged" / "latest").resolve().rglob("*") if path.is_symlink()]
    assert left == [] and not (tmp_path / "merged" / "latest" / "recordings").exists()
    assert (tmp_path / "merged" / "latest" / "logs" / "a" / "graph" / "rank0.log").is_file()


@pytest.mark.parametrize("place", ["logs", "recordings", "graphs"])
def test_a_folder_of_a_run_that_is_a_link_is_left_behind_whole(shards, tmp_path, place):
    foreign = tmp_path / "foreign"
    (foreign / "a").mkdir(parents=True)
    (foreign / "id_rsa").write_text("secret")
    (foreign / "a" / "id_rsa").write_text("secret")
    shutil.rmtree(shards[0] / place, ignore_errors=True)
    (shards[0] / place).symlink_to(foreign)
    assert merge(shards, tmp_path / "merged") == 0
    assert not list((tmp_path / "merged").rglob("id_rsa"))


def test_pipes_and_links_within_a_case_are_left_behind_and_do_not_block(shards, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "id_rsa").write_text("secret")
    (shards[0] / "logs" / "c" / "eager").symlink_to("../../../../foreign")
    os.mkfifo(shards[0] / "logs" / "c" / "pipe")
    os.mkfifo(shards[0] / "logs" / "pipe")
    assert merge(shards, tmp_path / "merged") == 0
    logs = tmp_path / "merged" / "latest" / "logs"
    assert sorted(path.name for path in logs.resolve().rglob("*") if not path.is_dir()) == [
        *(["host.log"] * 2),
        *(["rank0.log"] * 4),
    ]


def test_a_case_named_to_lead_out_of_the_run_makes_its_shard_count_as_missing(shards, tmp_path, capsys):
    tamper(shards[1], lambda values: values["cases"][0]["case"].update(name="../../b"))
    assert merge(shards, tmp_path / "merged") == 3
    assert f"bitproof: {shards[1]} counts as missing\nRecordingError: report.cases[0].case is not a case" in (
        capsys.readouterr().err
    )


def test_a_report_that_is_a_pipe_counts_as_missing(shards, tmp_path, capsys):
    (shards[1] / "report.json").unlink()
    os.mkfifo(shards[1] / "report.json")
    assert merge(shards, tmp_path / "merged") == 3
    assert "it is a pipe, not a regular file" in capsys.readouterr().err


def test_merged_files_are_copies(shards, tmp_path):
    assert merge(shards, tmp_path / "merged") == 0
    copy = tmp_path / "merged" / "latest" / "logs" / "a" / "graph" / "rank0.log"
    copy.write_text("changed")
    assert (shards[0] / "logs" / "a" / "graph" / "rank0.log").read_text() == "log of a"


@pytest.mark.parametrize("part", ["_copy_files", "write_run"])
def test_a_merge_that_fails_prints_its_verdicts_and_leaves_nothing(shards, tmp_path, monkeypatch, capsys, part):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(f"bitproof.harness.powers.merge.merge_command.{part}", fail)
    with pytest.raises(RecordingError, match="the shards' files cannot be put together\n  found: disk full\n"):
        merge(shards, tmp_path / "merged")
    assert list((tmp_path / "merged").iterdir()) == []
    assert "4 EQUAL" in capsys.readouterr().out
