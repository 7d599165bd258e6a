from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitproof.harness.runtime.search_path import search_path

ROOT = Path(__file__).parents[3]


@pytest.mark.ranks
def test_ranks_look_in_the_working_directory_first_unless_python_was_configured_not_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert search_path()[0] == str(tmp_path) and set(filter(None, sys.path)) <= set(search_path())
    code = (
        "import os; from bitproof.harness.runtime.search_path import search_path; print(os.getcwd() in search_path())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for flags, found in ([], "True"), (["-P"], "False"):
        command = [sys.executable, *flags, "-c", code]
        assert subprocess.check_output(command, env=environment, text=True).strip() == found
