from __future__ import annotations

import re
import shlex

import pytest
import typer

from bitproof.harness.cli import main
from bitproof.harness.cli.app import app
from bitproof.harness.cli.command_table import load_commands

load_commands([])
COMMANDS = {
    name: command
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_groups_examples_and_the_exit_statuses_at_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    statuses = re.findall(r"^  (\d)  \S", text.partition("\nExit status:\n")[2], re.MULTILINE)
    assert statuses in (["0", "1", "2", "3"], ["0", "2", "3"]) and text.endswith(", or interrupted\n")
    assert "\nExamples:\n  bitproof " in text
    assert max(map(len, text.splitlines())) <= 80


def test_no_line_about_a_command_is_cut_off_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert len(lines) == len(COMMANDS) and all(line.endswith(".") and not line.endswith("..") for line in lines)


@pytest.mark.parametrize("name", ["localize", "bisect", "shrink", "precompile", "record"])
@pytest.mark.parametrize("words", [["moe_sq"], ["-k", "moe_sq"], ["-kmoe_sq"]])
def test_a_command_of_one_case_takes_it_as_others_do(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {"precompile": ["--out", "step"], "record": ["--system", "graph", "--out", "here"]}.get(name, [])
    assert main([name, *needed, *words]) == 2
    assert "did you mean moe_seq?" in capsys.readouterr().err


def test_the_options_of_a_run_stand_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    heads = re.findall(r"^(\w.*):$", capsys.readouterr().out, re.MULTILINE)
    assert heads == [
        "Arguments",
        "Which cases",
        "Reports",
        "Changes to each case",
        "The candidate's graph",
        "Where ranks run",
        "How systems are compared",
        "Time and parallelism",
        "More to find out and to write",
        "Options",
        "Examples",
        "Exit status",
    ]


@pytest.mark.parametrize("example", [line for each in COMMANDS.values() for line in each.epilog.splitlines()])
def test_an_example_is_a_call_that_its_command_reads(example: str) -> None:
    program, name, *words = shlex.split(example)
    assert program == "bitproof"
    COMMANDS[name].make_context(name, words)
