"""Whatever path a command is given: a pipe, a device or an endless file is refused in words, and at once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch  # noqa: F401 - here, so that forks need not import it

from bitproof.harness.cli import main
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
    "merge": ["merge", "{folder}", "{folder}"],
    "check-certificate": ["check-certificate", "{folder}"],
    "--page": ["faults", "-k", "moe_seq", "--page", "{strange}"],
    "--precompiled": ["run", "-k", "moe_seq", "--steps", "1", "--world-size", "1", "--precompiled", "{folder}"],
}
FILES = (
    *("manifest.json", "digests.parquet", "report.json", "faults.json", "step.json", "step", "SHA256SUMS"),
    *("certificate.json", "reference.json", "candidate.json", "steps.json"),
)
pytestmark = pytest.mark.ranks

KINDS = ("a pipe", "zeros", "a link to itself")


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
    status, printed = run_forked(command, seconds=60)
    assert status in (1, 2, 3), printed
    assert "Traceback" not in printed, printed


def run_forked(command: list[str], seconds: float) -> tuple[int, str]:
    """A command's exit status and output, run in a fork of this process, which has imported it already. A fork that
    waits for longer is killed."""
    with open("printed", "w+b") as printed:
        if not (child := os.fork()):
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
            status = 3
            try:
                status = main(command)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        end = time.monotonic() + seconds
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
        if found[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail(f"{command} took longer than {seconds} s")
        printed.seek(0)
        return os.waitstatus_to_exitcode(found[1]), printed.read().decode(errors="replace")


def test_a_command_that_waits_is_killed_and_fails(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "main", lambda command: time.sleep(60))
    with pytest.raises(pytest.fail.Exception, match="took longer than"):
        run_forked(["list"], seconds=0.2)
