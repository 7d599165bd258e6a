"""What a file says is what runs, whatever compiled code lies beside it, with whatever size, time and flags."""

from __future__ import annotations

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
    monkeypatch.setattr(text_loader, "code_digests", {})
    (tmp_path / "module.py").write_text(BEFORE)
    return tmp_path / "module.py"


def run(file: Path) -> ModuleType:
    loader = TextLoader("module", str(file))
    module = ModuleType("module")
    exec(loader.get_code("module"), module.__dict__)
    return module


def cached_of(file: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(file)))


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
    assert run(file).x == 2, "and again, with what was compiled by then"


def test_compiled_code_is_written_by_the_hash_of_its_text_and_read_again(file: Path) -> None:
    assert run(file).x == 1
    content = cached_of(file).read_bytes()
    assert content[4:8] == b"\3\0\0\0" and content[8:16] == importlib.util.source_hash(BEFORE.encode())
    first = dict(text_loader.code_digests)
    forged = content[:16] + marshal.dumps(compile("x = 9", str(file), "exec"))
    cached_of(file).write_bytes(forged)
    assert run(file).x == 9, "it was read"
    assert text_loader.code_digests != first, "and is other code"


def test_code_has_one_digest_whether_it_was_compiled_or_read(file: Path) -> None:
    run(file)
    compiled = text_loader.code_digests[str(file)]
    run(file)
    assert text_loader.code_digests[str(file)] == compiled == TextLoader("module", str(file)).digest()
    edit_unseen(file)
    assert TextLoader("module", str(file)).digest() != compiled


def test_forged_code_did_not_run_the_text_and_code_that_python_compiled_did(file: Path) -> None:
    loader = TextLoader("module", str(file))
    run(file)
    assert loader.ran_text()
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    run(file)
    assert loader.ran_text()
    content = cached_of(file).read_bytes()
    cached_of(file).write_bytes(content[:16] + marshal.dumps(compile("x = 9", str(file), "exec")))
    run(file)
    assert not loader.ran_text()


@pytest.mark.parametrize("content", [b"", b"x" * 12, b"x" * 500, None])
def test_what_is_no_compiled_code_is_passed_over_and_written_anew(content: bytes | None, file: Path) -> None:
    run(file)
    whole = cached_of(file).read_bytes()
    cached_of(file).write_bytes(whole[:20] if content is None else content)
    assert run(file).x == 1
    assert cached_of(file).read_bytes() == whole


def test_code_that_was_compiled_in_another_place_is_compiled_anew(file: Path, tmp_path: Path) -> None:
    run(file)
    other = tmp_path / "elsewhere" / "module.py"
    cached_of(other).parent.mkdir(parents=True)
    other.write_text(BEFORE)
    cached_of(other).write_bytes(cached_of(file).read_bytes())
    assert TextLoader("module", str(other)).get_code("module").co_filename == str(other)


def test_where_nothing_may_be_written_the_text_runs_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", os.devnull)
    assert run(file).x == 1
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(file.parent / "prefix"))
    assert run(file).x == 1 and not (file.parent / "prefix").exists()


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

    def told(command: list[str]) -> str:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    assert told(plain) == "1 1 SourceFileLoader\n"
    edit_unseen(tmp_path / "helper.py")
    edit_unseen(tmp_path / "mine" / "deep.py")
    assert told(plain) == "1 1 SourceFileLoader\n", "Python itself does not see the edit"
    assert told(ours) == "2 2 TextLoader\n"


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


def test_the_form_of_code_does_not_depend_on_who_made_it_and_tells_a_slice_from_a_tuple() -> None:
    """From Python 3.14 on slices of numbers are constants, which early forms of compiled code lack."""
    code = compile("y = x[1:2, ::3]\n", "mine.py", "exec")
    form = text_loader._canonical(code)
    held = [each for each in code.co_consts if not isinstance(each, int)]
    assert text_loader._canonical(code) == form and held, "it is one, whoever holds a constant"
    forms = [text_loader._canonical(code.replace(co_consts=(x,))) for x in ((1, 2, None), (StopIteration, 1, 2, None))]
    if sys.version_info >= (3, 14):
        forms.append(text_loader._canonical(code.replace(co_consts=((slice(1, 2),),))))
    assert len(set(forms)) == len(forms)
