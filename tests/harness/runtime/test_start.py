"""The file that starts a host: bitproof is the one that the file lies in, and a user's modules are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
START = str(ROOT / "bitproof" / "harness" / "runtime" / "start.py")
MODULE = """
import json, multiprocessing, select, sys
import neighbour

def main():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(neighbour.files)
    print(json.dumps([sys.argv[1:], neighbour.files(), spawned, hasattr(select, "epoll")]))
"""
NEIGHBOUR = """
def files():
    from bitproof import builtin_cases, harness, reference
    return [module.__file__ for module in (harness, reference, builtin_cases)]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "bitproof").mkdir()  # such as another checkout
    (tmp_path / "bitproof" / "__init__.py").write_text("raise ImportError('theirs')")
    return tmp_path


def start(folder, **environment):
    command = [sys.executable, "-P", START, "mine", "--verbose"]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize("path", [str(ROOT), "."])
def test_in_a_folder_with_another_bitproof_ours_is_imported_also_where_spawned(folder, path):
    done = start(folder, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    ours = [str(ROOT / "bitproof" / name / "__init__.py") for name in ("harness", "reference", "builtin_cases")]
    assert json.loads(done.stdout) == [["--verbose"], ours, ours, True]


def test_the_working_directory_is_left_out_where_python_was_configured_so(folder):
    done = start(folder, PYTHONSAFEPATH="1")
    assert done.returncode == 1 and "No module named 'mine'" in done.stderr


def test_nothing_looks_for_garbage_while_the_module_is_imported(folder):
    (folder / "mine.py").write_text("import gc\nwas_on = gc.isenabled()\ndef main():\n    print(was_on)")
    assert start(folder).stdout == "False\n"
