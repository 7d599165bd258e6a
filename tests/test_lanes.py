"""The watch in `conftest.py` holds the lanes apart: it is tried on a folder of tests of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

TESTS = """
import os, subprocess, sys
import pytest

def test_forks():
    if os.fork() == 0:
        os._exit(0)

def test_forks_and_hides_it():
    try:
        os.fork()
    except BaseException:
        pass

def test_starts_python():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.fixture(scope="module")
def started():
    return subprocess.run([sys.executable, "-c", ""], check=True)

def test_asks_for_what_starts_python(started):
    pass

def test_starts_something_else():
    subprocess.run(["true"], check=True)

@pytest.mark.ranks
def test_may():
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    subprocess.run([sys.executable, "-c", ""], check=True)
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_only_a_marked_test_may_fork_or_start_python(tmp_path):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = ranks\n    traces\n")
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {name: outcome for outcome, name in re.findall(r"^(\w+) test_them\.py::(\w+)", done.stdout, re.MULTILINE)}
    assert found == {
        "test_forks": "FAILED",
        "test_forks_and_hides_it": "FAILED",
        "test_starts_python": "FAILED",
        "test_asks_for_what_starts_python": "ERROR",
        "test_starts_something_else": "PASSED",
        "test_may": "PASSED",
    }, done.stdout
    assert "forks without the marker: put `pytestmark = pytest.mark.ranks`" in done.stdout


def test_a_file_of_tests_that_trace_lies_where_the_watch_looks_for_it():
    tests = Path(__file__).parent
    named = re.findall(r'^    "tests/(.+)",$', (tests / "conftest.py").read_text(), re.MULTILINE)
    assert len(named) > 20
    assert [each for each in named if not (tests / each).exists()] == []
