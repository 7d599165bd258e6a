from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitproof.harness.program import own_packages
from bitproof.harness.program.own_packages import OwnPackages, fix_of_clash, hidden, remark, search_path

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_our_packages_are_found_where_they_lie_and_nothing_else_is(folder, monkeypatch):
    (folder / "cases.py").write_text("")
    monkeypatch.syspath_prepend(folder)
    for name in own_packages.NAMES:
        assert OwnPackages.find_spec(name).origin == str(ROOT / name / "__init__.py")
    assert (
        OwnPackages.find_spec("json") is None
        and OwnPackages.find_spec("bitproof.builtin_cases.examples", ["x"]) is None
    )


def test_a_folder_without_a_clash_is_not_remarked(folder):
    (folder / "cases").mkdir()
    (folder / "cases" / "of_wine.txt").write_text("a folder of this name is common; only Python could be imported")
    (folder / "mine.py").write_text("")
    assert remark() is None and fix_of_clash("bitproof.builtin_cases.examples") is None


def test_our_own_root_is_no_clash(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert remark() is None


@pytest.mark.parametrize("file", ["reference/__init__.py", "reference/loops.py", "reference.py"])
def test_a_package_a_plain_folder_of_modules_and_a_module_are_named(folder, file):
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("")
    found = folder / file.partition("/")[0]
    assert hidden("reference") == found
    assert remark() == (
        f"bitproof: {found} is not imported: bitproof's own packages, in {ROOT}, are named harness, reference, cases; "
        "rename yours where a system, a pass or a case needs it"
    )
    assert fix_of_clash("reference.loops") == f"rename {found}: reference is bitproof's own package, in {ROOT}"
    assert fix_of_clash("cases.loops") is None and fix_of_clash("my.reference") is None and fix_of_clash(None) is None


def test_several_are_named_in_one_line(folder):
    for name in ("cases.py", "harness.py"):
        (folder / name).write_text("")
    assert remark().startswith(f"bitproof: {folder}/harness.py and {folder}/cases.py are not imported: ")


@pytest.mark.ranks
def test_ranks_look_in_the_working_directory_first_unless_python_was_told_not_to(folder):
    assert search_path()[0] == str(folder) and set(filter(None, sys.path)) <= set(search_path())
    code = (
        "import os; from bitproof.harness.program.own_packages import search_path; print(os.getcwd() in search_path())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for flags, found in ([], "True"), (["-P"], "False"):
        command = [sys.executable, *flags, "-c", code]
        assert subprocess.check_output(command, env=environment, text=True).strip() == found
