"""The table of torch's passes: a run that was cut off goes on with the models that have no rows yet."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import prove_inductor

ROW = {"name": "a pass", "proved": True, "changed": True, "witness": None, "why": None}


def test_kept_rows_are_not_computed_again_and_a_model_that_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    failing = {"mlp"}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command[-1])
        return subprocess.CompletedProcess(command, command[-1] in failing, json.dumps([ROW]), "Error: no memory")

    monkeypatch.setattr(subprocess, "run", run)
    keep = tmp_path / "rows"
    assert prove_inductor.main(["llama3 of ours", "mlp"], keep) == 1
    assert "not compiled: mlp: Error: no memory" in capsys.readouterr().out
    failing.clear()
    assert prove_inductor.main(["llama3 of ours", "mlp"], keep) == 0
    assert "| a pass | 2 | 0 | 2 | 0 | 0 |" in capsys.readouterr().out
    assert ran == ["llama3 of ours", "mlp", "mlp"]
    prove_inductor.main(["mlp"])
    assert ran[3:] == ["mlp"]
