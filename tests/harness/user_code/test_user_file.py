from __future__ import annotations

import hashlib
import sys

import pytest

from bitproof.harness.case.case import file_of
from bitproof.harness.errors import UsageError
from bitproof.harness.user_code.user_file import is_loading, names_in, run_file


def test_a_source_names_a_file_by_its_suffix_or_a_slash() -> None:
    assert [str(file_of(source)) for source in ("a.py", "b/c", "b.c")] == ["a.py", "b/c", "None"]


def test_a_file_runs_as_a_module_and_tells_the_digest_of_what_ran(tmp_path, monkeypatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("value = 7\n")
    module, sha256 = run_file(file)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert (module.value, module.__file__) == (7, str(file))
    assert sha256 == hashlib.sha256(b"value = 7\n").hexdigest()


def test_a_file_s_annotations_are_what_it_says_and_no_texts(tmp_path, monkeypatch) -> None:
    """torch looks at those of a communication hook."""
    file = tmp_path / "mine.py"
    file.write_text("def hook(bucket: int): ...\n")
    module, _ = run_file(file)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert module.hook.__annotations__ == {"bucket": int}
    file.write_text("from __future__ import annotations\ndef hook(bucket: int): ...\n")
    module, _ = run_file(file)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert module.hook.__annotations__ == {"bucket": "int"}


def test_names_are_read_without_running_the_file(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os.path as p, json\n\ndef f():\n    inner = 1\n\nif f:\n    x = 1 / 0\n")
    assert names_in(file, "a pass") == {"p", "json", "f", "x"}


@pytest.mark.parametrize("code", ["from os import *", "def __getattr__(name): ...", "globals()['x'] = 1"])
def test_what_only_running_can_tell_is_not_guessed(tmp_path, code) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    assert names_in(file, "a pass") is None


def test_a_file_that_cannot_be_read_or_is_not_python_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="the file of a pass cannot be read"):
        names_in(tmp_path / "none.py", "a pass")
    (tmp_path / "mine.py").write_text("def")
    with pytest.raises(UsageError, match="the file of a pass is not Python"):
        names_in(tmp_path / "mine.py", "a pass")


def test_a_file_finds_the_modules_beside_it_and_those_of_its_package(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    package = tmp_path / "trainers_of_mine"
    package.mkdir()
    for name, code in (("__init__", ""), ("beside_it", "value = 8\n"), ("mine", "from .beside_it import value\n")):
        (package / f"{name}.py").write_text(code)
    (tmp_path / "beside_that.py").write_text("value = 7\n")
    (tmp_path / "mine.py").write_text(
        "from beside_that import value\nfrom trainers_of_mine.beside_it import value as other\n"
    )
    monkeypatch.chdir(tmp_path.parent)
    alone, _ = run_file(tmp_path / "mine.py")
    within, _ = run_file(package / "mine.py")
    assert (alone.value, alone.other, within.value) == (7, 8, 8)
    assert sys.path.count(str(tmp_path)) == 1 and str(package) not in sys.path
    for module in list(sys.modules):
        if module.startswith(("trainers_of_mine", "beside_that", "mine_")):
            monkeypatch.delitem(sys.modules, module)


def test_a_file_knows_that_it_is_being_loaded_also_one_that_fails(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from bitproof.harness.user_code.user_file import is_loading\nseen = is_loading()\n1 / (not seen)\n"
    )
    with pytest.raises(ZeroDivisionError):
        run_file(file)
    assert not is_loading()
