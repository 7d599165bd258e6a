"""Names that a shell completes, and cases that `run` takes by name as other commands do."""

from __future__ import annotations

import pytest

from bitproof.harness.cli import main, run
from bitproof.harness.cli.completion import names_in_catalogue, names_of_cases, names_of_faults, names_of_systems


def test_cases_complete_alone_and_after_the_last_word_of_an_expression():
    assert names_of_cases("transformer_b")[0] == "transformer_batch"
    assert "moe_seq or transformer_batch" in names_of_cases("moe_seq or transformer_b")
    assert names_of_cases("nothing_begins_so") == []


def test_systems_and_faults_complete():
    assert names_of_systems("eager_") == ["eager_chunked"]
    assert "flip-bit" in names_of_faults("fl")
    assert names_in_catalogue("halves-o") == ["halves-overlap-by-one"] and not names_in_catalogue("fl")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("bitproof run moe_s", "moe_seq"),
        ("bitproof localize moe_s", "moe_seq"),
        ("bitproof run -k moe_s", "moe_seq"),
        ("bitproof prove moe_s", "moe_seq"),
        ("bitproof faults --fault halves-o", "halves-overlap-by-one"),
    ],
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
    ("module", "function", "words"),
    [
        ("bitproof.harness.powers.sensitivity.command", "sensitivity", ["sensitivity"]),
        ("bitproof.harness.powers.baselines.accept_command", "accept", ["accept", "--why", "so"]),
        ("bitproof.harness.powers.mutants.command", "faults", ["faults", "--fault", "halves-overlap-by-one"]),
        ("bitproof.harness.powers.proofs.command", "prove", ["prove"]),
    ],
)
def test_every_command_of_several_cases_takes_them_by_name(monkeypatch, capsys, module, function, words):
    seen = []
    monkeypatch.setattr(f"{module}.{function}", lambda cases, *_, **__: seen.append([case.name for case in cases]) or 0)
    assert main([*words, "moe_seq", "moe_batch", "moe_seq"]) == 0
    assert seen == [["moe_seq", "moe_batch"]]
    assert main([*words, "moe_sek"]) == 2 and main([*words, "moe_seq", "-k", "moe"]) == 2
    said = capsys.readouterr().err
    assert "did you mean moe_seq?" in said and "cases are given twice" in said


def test_list_takes_cases_by_name(capsys):
    assert main(["list", "moe_seq"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["chunking,", "moe_seq"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["moe_sek"], "did you mean moe_seq?"),
        (["moe_seq", "-k", "moe"], "cases are given twice"),
        (["-k", "moe_seq", "-k", "moe_batch"], "-k is given twice"),
        (["moe_seq", "--", "--lr", "3"], "words after -- are arguments of a script"),
        (["trainer.py:system"], "fix: trainer.py:system is a system"),
        (["moe_seq", "--candidate-args=x"], "are for scripts"),
        (["train.py", "--lr", "3e-4"], "own arguments come after --: bitproof run train.py -- --lr ..."),
        (["moe_seq", "--lr", "3e-4"], "No such option: --lr"),
    ],
)
def test_a_name_that_fits_nothing_is_refused(ran, capsys, words, said):
    assert main(["run", *words]) == 2 and not ran
    assert said in capsys.readouterr().err


def test_a_script_without_a_command_is_answered_with_the_command(capsys):
    assert main(["train.py", "--lr", "3"]) == 2
    assert "fix: bitproof run train.py --lr 3" in capsys.readouterr().err


def test_a_revision_and_a_missing_script_are_reported_before_anything_is_made(ran, capsys, tmp_path, monkeypatch):
    from bitproof.harness.processes.command import run_command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (["init", "-q"], ["add", "train.py"], [*who, "commit", "-qm", "first"]):
        assert run_command(["git", *words], 60.0).status == 0
    assert main(["run", "train.py", "--reference", "HEAD"]) == 2
    assert "fix: give --reference git:HEAD" in capsys.readouterr().err
    assert main(["run", "tran.py", "--reference", "git:HEAD"]) == 2
    assert "the file of script tran.py cannot be read" in capsys.readouterr().err and not ran
