"""Names that a shell completes, and cases that `run` takes by name as other commands do."""

from __future__ import annotations

import pytest

from bitproof.harness.cli import main, run
from bitproof.harness.cli.completion import names_of_cases, names_of_faults, names_of_systems


def test_cases_complete_alone_and_after_the_last_word_of_an_expression():
    assert names_of_cases("transformer_b")[0] == "transformer_batch"
    assert "moe_seq or transformer_batch" in names_of_cases("moe_seq or transformer_b")
    assert names_of_cases("nothing_begins_so") == []


def test_systems_and_faults_complete():
    assert names_of_systems("eager_") == ["eager_chunked"]
    assert "flip-bit" in names_of_faults("fl")


@pytest.mark.parametrize(
    ("words", "completed"),
    [("bitproof run moe_s", "moe_seq"), ("bitproof localize moe_s", "moe_seq"), ("bitproof run -k moe_s", "moe_seq")],
)
def test_a_shell_gets_them_where_a_command_takes_them(monkeypatch, capsys, words, completed):
    monkeypatch.setenv("_BITPROOF_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert main([]) == 0
    assert completed in capsys.readouterr().out.split()


@pytest.fixture
def ran(monkeypatch):
    """Which cases `run` is about to run, and how a replay is written."""
    seen = []
    monkeypatch.setattr(run, "run_and_report", lambda cases, *more, **_: seen.append(([*cases], more[2])) or 0)
    return seen


def test_run_takes_cases_by_name_each_once_and_exactly_those(ran):
    assert main(["run", "moe_seq", "moe_batch", "moe_seq", "--steps", "2"]) == 0
    ((cases, replay),) = ran
    assert [case.name for case in cases] == ["moe_seq", "moe_batch"] and {case.steps for case in cases} == {2}
    assert replay == ["--steps", "2"]


def test_a_named_case_takes_a_script_as_its_candidate(ran):
    assert main(["run", "moe_seq", "--candidate", __file__]) == 0
    ((cases, _),) = ran
    assert [(case.name, case.candidate) for case in cases] == [("moe_seq", __file__)]


def test_run_takes_the_file_of_a_case(ran, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"like": "moe_seq", "name": "mine"}')
    assert main(["run", str(path)]) == 0
    ((cases, replay),) = ran
    assert [case.name for case in cases] == ["mine"] and replay == ["--case", str(path)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["moe_sek"], "did you mean moe_seq?"),
        (["moe_seq", "-k", "moe"], "cases are given twice"),
        (["moe_seq", "--candidate-args=x"], "are for scripts"),
        (["train.py", "--lr", "3e-4"], "own arguments come after --: bitproof run train.py -- --lr ..."),
        (["moe_seq", "--lr", "3e-4"], "No such option: --lr"),
    ],
)
def test_a_name_that_fits_nothing_is_refused(ran, capsys, words, said):
    assert main(["run", *words]) == 2 and not ran
    assert said in capsys.readouterr().err
