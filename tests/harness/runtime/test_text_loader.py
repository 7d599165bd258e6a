"""Modules run their text, whatever bytecode lies beside it, with whatever size, time, hash and flags."""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import py_compile
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from bitproof.harness.runtime import text_loader
from bitproof.harness.runtime.sources import ROOT
from bitproof.harness.runtime.text_loader import TextLoader

BEFORE, AFTER = "x = 1\n", "x = 2\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(text_loader, "text_digests", {})
    (tmp_path / "module.py").write_text(BEFORE)
    return tmp_path / "module.py"


def run(file: Path) -> ModuleType:
    loader = TextLoader("module", str(file))
    module = ModuleType("module")
    exec(loader.get_code("module"), module.__dict__)
    return module


def edit_unseen(file: Path) -> None:
    """Change the text but neither size nor time, as `cp -p`, rsync and tar may."""
    times = file.stat()
    file.write_text(AFTER)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_an_edit_of_the_same_size_and_time_runs_whatever_was_compiled(
    mode: py_compile.PycInvalidationMode, file: Path
) -> None:
    py_compile.compile(str(file), invalidation_mode=mode)
    edit_unseen(file)
    assert run(file).x == 2
    assert run(file).x == 2, "and again"


@pytest.mark.ranks
def test_forged_bytecode_with_the_hash_of_the_text_does_not_run(file: Path) -> None:
    cached = Path(py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH) or "")
    forged = cached.read_bytes()[:16] + marshal.dumps(compile("x = 9", str(file), "exec"))
    cached.write_bytes(forged)
    plain = [sys.executable, "-c", "import module; print(module.x)"]
    assert subprocess.run(plain, cwd=file.parent, capture_output=True, text=True).stdout == "9\n", "Python runs it"
    assert run(file).x == 1


def test_the_text_that_ran_is_known_and_no_bytecode_is_written(file: Path) -> None:
    for text in (BEFORE, AFTER):
        file.write_text(text)
        run(file)
        assert text_loader.text_digests == {str(file): hashlib.sha256(text.encode()).hexdigest()}
    assert [*file.parent.iterdir()] == [file]


@pytest.mark.ranks
@pytest.mark.parametrize("prefix", [False, True])
def test_in_a_process_of_ours_a_users_module_and_what_it_imports_run_their_text(prefix: bool, tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if prefix:
        environment["PYTHONPYCACHEPREFIX"] = str(tmp_path / "cached")
    (tmp_path / "mine").mkdir()
    for name, text in {"mine/__init__.py": "", "mine/deep.py": BEFORE, "helper.py": BEFORE}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "show.py").write_text(
        "import helper, mine.deep\n\ndef main():\n    print(helper.x, mine.deep.x, type(helper.__loader__).__name__)\n"
    )
    plain = [sys.executable, "-c", "import show; show.main()"]
    ours = [sys.executable, "-P", str(ROOT / "harness" / "runtime" / "start.py"), "show"]

    def described(command: list[str]) -> str:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    assert described(plain) == "1 1 SourceFileLoader\n"
    edit_unseen(tmp_path / "helper.py")
    edit_unseen(tmp_path / "mine" / "deep.py")
    assert described(plain) == "1 1 SourceFileLoader\n", "Python itself does not see the edit"
    assert described(ours) == "2 2 TextLoader\n"


def test_a_place_is_searched_for_once_and_what_is_installed_keeps_pythons_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted(PathFinder):
        searches: ClassVar[list[str]] = []

        @classmethod
        def find_spec(cls, name: str, *others: Any) -> ModuleSpec | None:
            cls.searches.append(name)
            return super().find_spec(name, *others)

    (tmp_path / "nobodys_name.py").write_text(BEFORE)
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    text_loader.claim()  # which imports what says where Python is installed
    monkeypatch.setattr(text_loader, "PathFinder", Counted)
    monkeypatch.setattr(sys, "meta_path", [text_loader.TextFinder, Counted])
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.util.find_spec("nobodys_name")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    installed = importlib.util.find_spec("colorsys")
    assert Counted.searches == ["nobodys_name", "colorsys"]
    assert found is not None and isinstance(found.loader, TextLoader)
    assert installed is not None and type(installed.loader) is SourceFileLoader
