"""Whatever path a command is given: a pipe, a device or an endless file is refused in words, and at once."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from bitproof.harness.processes.command import run_command
from tests.harness.files.test_plain_files import STRANGE

COMMANDS = {
    "--case": ["list", "--case", "{strange}"],
    "run --case": ["run", "--case", "{strange}"],
    "like": ["list", "--case", "{like}"],
    "localize": ["localize", "{strange}.json"],
    "--names": ["run", "--case", "{own}", "--names", "{strange}"],
    "a system's file": ["run", "-k", "moe_seq", "--candidate", "{strange}.py:make"],
    "--extra-pass": ["run", "-k", "moe_seq", "--extra-pass", "{strange}.py:make"],
    "--data": ["run", "-k", "transformer_batch", "--steps", "1", "--world-size", "1", "--data", "{strange}"],
    "prove": ["prove", "{strange}", "{strange}"],
    "diff": ["diff", "{folder}", "{folder}"],
    "report": ["report", "{folder}"],
    "history add": ["history", "add", "{folder}", "--db", "new.sqlite"],
    "history show": ["history", "show", "--db", "{strange}"],
    "merge": ["merge", "{folder}", "{folder}"],
    "check-certificate": ["check-certificate", "{folder}"],
    "--page": ["faults", "-k", "moe_seq", "--page", "{strange}"],
    "--precompiled": ["run", "-k", "moe_seq", "--steps", "1", "--world-size", "1", "--precompiled", "{folder}"],
}
FILES = (
    *("manifest.json", "digests.parquet", "report.json", "faults.json", "step.json", "step", "SHA256SUMS"),
    *("certificate.json", "reference.json", "candidate.json", "steps.json"),
)
KINDS = ("a pipe", "zeros", "a link to itself")


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", COMMANDS)
def test_a_strange_file_is_refused(tmp_path: Path, monkeypatch, what: str, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    make = STRANGE[kind]
    strange = make(tmp_path / "strange")
    for ending in (".py", ".json"):
        make(tmp_path / f"strange{ending}")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in FILES:
        make(folder / name)
    (tmp_path / "like.json").write_text(json.dumps({"like": "strange.json"}))
    own = {"name": "own", "reference": "own.py:make", "candidate": "own.py:make", "parallelism": {"world_size": 1}}
    (tmp_path / "own.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text("make = None\n")
    paths = {"strange": strange, "like": tmp_path / "like.json", "folder": folder, "own": tmp_path / "own.json"}
    command = [word.format(**paths) for word in COMMANDS[what]]
    bitproof = shutil.which("bitproof", path=os.path.dirname(sys.executable))
    done = run_command([bitproof, *command], 60, folder=tmp_path)
    assert done.status in (1, 2, 3), done
    assert "Traceback" not in done.out + done.err, done.err
