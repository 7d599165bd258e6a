"""A check of a user's file: its options, its finding in every form of a report, and what it may do wrong."""

from __future__ import annotations

import json
import textwrap
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import bitproof
from bitproof.harness import settings
from bitproof.harness.case.case_file import case_text
from bitproof.harness.checks import shipped
from bitproof.harness.cli import main
from bitproof.harness.cli.run import declare
from bitproof.harness.errors import UsageError
from bitproof.harness.execute.checks.findings import judged
from bitproof.harness.records import Finding, Report, Sentence, Table, Verdict
from bitproof.harness.report import json as report_json
from bitproof.harness.report.ci import ci_lines, comment, junit, sarif
from bitproof.harness.report.html import document
from bitproof.harness.report.markdown import render as markdown
from bitproof.harness.report.status import exit_status
from bitproof.harness.report.terminal import print_report
from tests.distributions import install
from tests.harness.execute.test_launch import toy
from tests.harness.reports import case, result

EVIDENCE = SimpleNamespace(result=SimpleNamespace(verdict=Verdict.EQUAL))
CHECK = """
    from dataclasses import dataclass
    from bitproof import Check, Finding, Table, setting

    @dataclass(frozen=True)
    class Options:
        most: int = setting(5, "--most-losses", "Losses", "The most losses that a case may have.", least=1)

    class Losses(Check):
        '''Count losses.'''
        name = "losses"
        Options = Options

        def judge(self, evidence):
            count = len(evidence.recording("candidate").losses())
            calls = [len(evidence.calls("candidate", step)[0]) for step in (1, 0, 1)]
            again = len(evidence.run("candidate").losses())
            return Finding(
                brief=f"{count} losses",
                objection=f"{count} losses, at most {self.options.most} are allowed" * (count > self.options.most),
                blocks=(Table("losses of rank 0", ("run", "count"), (("first", count), ("again", again))),),
                data={"count": count, "again": again, "calls": calls[0] == calls[2] > 5},
            )
"""


@pytest.fixture(autouse=True)
def _commands_as_before():
    yield
    declare(shipped.shipped_checks())  # without the options of these tests' checks


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(textwrap.dedent(CHECK))
    return f"{tmp_path / 'own.py'}:Losses"


@pytest.mark.ranks
@pytest.mark.parametrize(("most", "status"), [(2, 0), (1, 1)])
def test_a_check_of_a_file_judges_a_run_and_its_options_are_options_of_the_command(
    tmp_path, own, most, status, capsys, one_host
):
    (tmp_path / "case.json").write_text(case_text(toy()))
    run = ["run", "--case", str(tmp_path / "case.json"), "--device", "cpu", "--steps", "2", "--control", "never"]
    run += ["--report-dir", str(tmp_path / "reports")]
    assert main([*run, "--check", own, "--most-losses", str(most)]) == status
    [entry] = json.loads((tmp_path / "reports/latest/report.json").read_text())["cases"]
    assert entry["checks"]["losses"]["data"] == {"count": 2, "again": 2, "calls": True}
    assert (entry["verdict"], entry["as_expected"]) == ("EQUAL", status == 0)
    shown = capsys.readouterr().out
    assert "2 losses" in shown
    replay = f"--check {own} --most-losses {most}"
    assert (replay in shown) == (status == 1), "the replay line repeats the check and its options"


@pytest.mark.ranks
def test_python_takes_a_class_and_its_options_as_keywords(tmp_path, own, one_host):
    options = {"device": "cpu", "steps": 2, "control": "never", "report_dir": tmp_path / "reports"}
    done = bitproof.run(toy(), checks=[own], most_losses=1, **options)
    assert done.verdict == "EQUAL" and not done.as_expected
    assert "check losses: 2 losses, at most 1 are allowed" in str(done)


def report_with(finding: Finding) -> Report:
    cases = [replace(result(case()), checks={"own": finding})]
    return Report(run_id="one", exit_status=exit_status(cases), environment={}, cases=cases)


OBJECTS = Finding(
    brief="3 <b>losses</b>",
    objection="too many losses",
    blocks=(Sentence("a sentence"), Table("a title", ("side", "count"), (("reference", "3"),))),
    data={"count": 3},
)


def test_every_form_shows_a_finding_and_its_objection(capsys):
    report = report_with(OBJECTS)
    print_report(report)
    printed = capsys.readouterr().out
    for form in (markdown(report), document.render(report), printed):
        assert all(text in form for text in ("too many losses", "a sentence", "a title", "reference", "count"))
    assert "<b>losses" not in markdown(report) and "<b>losses" not in document.render(report)
    for form in (junit.render(report), sarif.render(report), ci_lines.render(report), comment.render(report)):
        assert "check own: too many losses" in form
    assert report_json.parse(report_json.render(report)).cases[0].checks == {"own": OBJECTS}
    assert report.exit_status == 1


def test_a_finding_that_could_not_judge_ends_with_3():
    assert report_with(Finding(unjudged="memory is not known")).exit_status == 3
    assert report_with(Finding(brief="fine")).exit_status == 0


MOST = bitproof.setting(1, "--most", "Losses", "The most losses.")


def check_that(judge):
    return type("Own", (bitproof.Check,), {"name": "own", "judge": judge})(None)


@pytest.mark.parametrize(
    ("judge", "found"),
    [
        (lambda self, evidence: 1 / 0, "it raised ZeroDivisionError"),
        (lambda self, evidence: exit(0), "it raised SystemExit"),
        (lambda self, evidence: "fine", "judge returned str"),
        (lambda self, evidence: Finding(data={"x": float("nan")}), "check own returns data that JSON cannot"),
        (lambda self, evidence: Finding(data={"x": object()}), "check own returns data that JSON cannot"),
        (lambda self, evidence: Finding(blocks=(Table("t", ("a",), (("1", "2"),)),)), "it raised ValueError"),
    ],
)
def test_a_check_that_fails_leaves_the_case_unjudged(judge, found):
    assert judged(check_that(judge), EVIDENCE).unjudged.startswith(found)


def test_a_check_that_fails_to_say_whether_it_judges_leaves_the_case_unjudged():
    check = check_that(lambda self, evidence: Finding(brief="fine"))
    type(check).judges = lambda self, verdict: 1 / 0
    assert judged(check, EVIDENCE).unjudged.startswith("it raised ZeroDivisionError")


def test_a_check_judges_a_failed_case_only_if_it_says_so():
    check = check_that(lambda self, evidence: Finding(brief="fine"))
    failed = SimpleNamespace(result=SimpleNamespace(verdict=Verdict.ERROR))
    assert judged(check, failed) is None
    type(check).judges = lambda self, verdict: True
    assert judged(check, failed).brief == "fine"


def test_a_check_that_has_nothing_to_say_leaves_nothing():
    assert judged(check_that(lambda self, evidence: None), EVIDENCE) is None


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("", "Own", "own.py has no class Own"),
        ("class Own: pass", "Own", "is no subclass of bitproof.Check"),
        ("from bitproof import Check\nclass Own(Check): name = 'a b'", "Own", "its name 'a b' is no Python identifier"),
        ("from bitproof import Check\nclass Own(Check): judge = print", "Own", "Own has no name"),
        ("from bitproof import Check\nclass Own(Check): name = 'own'", "Own", "does not define judge"),
        ("x = 1 / 0", "Own", "ZeroDivisionError: division by zero"),
        ("def f(:", "Own", "SyntaxError"),
    ],
)
def test_what_is_no_check_is_refused_before_anything_runs(tmp_path, text, name, found):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(UsageError) as refused:
        shipped.all_checks([f"{tmp_path / 'own.py'}:{name}"])
    assert found in str(refused.value)


def test_a_package_whose_check_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "mine", "[bitproof.checks]\nown = broken_check:Own\n")
    (tmp_path / "broken_check.py").write_text("x = 1 / 0")
    with pytest.raises(UsageError, match=r"entry point own of mine 1\.0 cannot be loaded") as refused:
        shipped.all_checks()
    assert "ZeroDivisionError" in str(refused.value) and "uninstall" in str(refused.value)


def test_an_unknown_keyword_of_an_option_and_a_value_of_another_type_are_refused():
    with pytest.raises(TypeError, match=r"option --most has no keyword 'unit'; its keywords are .*least, problem"):
        bitproof.setting(1, "--most", "Losses", "The most losses.", unit="1")
    with pytest.raises(UsageError, match="most has no value that --most takes") as refused:
        settings.checked(make_dataclass("Options", [("most", int, MOST)]), {"most": "many"})
    assert "'many', no whole number" in str(refused.value)


def test_a_mistyped_keyword_of_a_check_is_compared_with_its_own(own):
    with pytest.raises(TypeError, match="did you mean 'most_losses'"):
        bitproof.run("moe_seq", checks=[own], most_loses=1)


def test_a_file_that_is_not_there_and_a_text_without_a_class_are_refused(tmp_path):
    for source in (f"{tmp_path / 'none.py'}:Own", "own"):
        with pytest.raises(UsageError, match=r"FILE\.py:CLASS"):
            shipped.all_checks([source])


def test_an_option_that_exists_already_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(textwrap.dedent(CHECK).replace("--most-losses", "--steps"))
    with pytest.raises(UsageError, match="has an option that exists already"):
        shipped.all_checks([f"{tmp_path / 'own.py'}:Losses"])


def test_two_checks_of_one_name_are_refused(tmp_path):
    (tmp_path / "own.py").write_text(textwrap.dedent(CHECK).replace('"losses"', '"sensitivity"'))
    with pytest.raises(UsageError, match="two checks are named 'sensitivity'"):
        shipped.all_checks([f"{tmp_path / 'own.py'}:Losses"])


def test_a_report_of_schema_1_is_read_with_its_sensitivity_under_that_check():
    values = report_json.to_dict(report_with(Finding()))
    [entry] = values["cases"]
    values["schema"], entry["checks"] = 1, {}
    entry["sensitivity"] = {"reason": "it cannot be"}
    [found] = report_json.parse(json.dumps(values)).cases
    assert found.checks["sensitivity"].data["reason"] == "it cannot be"
