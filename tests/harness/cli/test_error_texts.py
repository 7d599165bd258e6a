"""What commands say of wrong calls, a file a command: a text is mended in the source, and here by one command.

    BITPROOF_WRITE_TEXTS=1 python -m pytest tests/harness/cli/test_error_texts.py

writes the files again. A line that begins with `$` is a call; below it stand its exit status and what it printed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.cli import command_table, main

FOLDER = Path(__file__).parent / "error_texts"
RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
OF_OTHERS = re.compile(r"Usage: .*\nTry .*\n\n|: (Input should|Value error).*| \(Possible options?: .*")
"""What the library that reads the command line says in its own words, which its releases change."""
COMMANDS = sorted(command_table.COMMANDS)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that calls name, in which they run, 80 columns wide."""
    case = CASES["moe_seq"].to_dict()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "misspelled.json").write_text(json.dumps(case | {"steeps": 3}))
    (tmp_path / "module.py").write_text("def present(graph, context):\n    return graph\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "report.json").write_text('{"schema": 1, "cases": 5}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    return tmp_path


def said(call: str, here: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """A call with its exit status and what it printed."""
    program, *arguments = shlex.split(call)
    assert program == "bitproof"
    status = main(arguments)
    printed = RUN_ID.sub("<run>", "".join(capfd.readouterr()).replace(str(here), "<here>"))
    return f"$ {call}\nexit status {status}\n{OF_OTHERS.sub('', printed).rstrip()}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_call_is_answered_by_its_text_and_no_case_runs(
    command: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = FOLDER / f"{command}.txt"
    calls = [line[2:] for line in file.read_text().splitlines() if line.startswith("$ ")]
    assert calls and all(shlex.split(call)[1] == command for call in calls)
    text = "\n".join(said(call, here, capfd) for call in calls)
    if os.environ.get("BITPROOF_WRITE_TEXTS"):
        file.write_text(text)
    assert text == file.read_text()
    assert "exit status 0" not in text and "Traceback" not in text
    assert not [*here.glob("reports/*/report.json")]
