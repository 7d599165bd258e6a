from __future__ import annotations

import hashlib
import sys

import pytest

from bitproof.harness.case.case import file_of
from bitproof.harness.errors import UsageError
from bitproof.harness.user_code.user_file import is_loading, names_in, run_file


def test_a_source_names_a_file_by_its_suffix_or_a_slash() -> None:
    assert [str(file_of(source)) for source in ("a.py", "b/c", "b.c")] == ["a.py", "b/c", "None"]


def test_a_file_runs_as_a_module_and_shows_the_digest_of_what_ran(tmp_path, monkeypatch) -> None:
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
def test_what_only_running_can_show_is_not_guessed(tmp_path, code) -> None:
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


@pytest.fixture
def two_folders(tmp_path, monkeypatch):
    """Two files that each have a module `own_util` beside them, in a process that forgets what it loads here."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "own_util.py").write_text(f"SIDE = {side!r}\n")
        (tmp_path / side / "mine.py").write_text(f"import own_util\nSIDE = own_util.SIDE  # of {side}\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_second_file_does_not_get_the_first_ones_module_of_the_same_name(two_folders) -> None:
    assert run_file(two_folders / "old" / "mine.py")[0].SIDE == "old"
    with pytest.raises(UsageError) as refused:
        run_file(two_folders / "new" / "mine.py")
    assert str(refused.value) == (
        f"UsageError: {two_folders}/new/mine.py imports own_util, and this process has another module of that name\n"
        f"  expected: {two_folders}/new/own_util.py, which lies beside it\n"
        f"  found: {two_folders}/old/own_util.py, loaded before\n"
        "  fix: rename own_util, or make the folder a package (an empty __init__.py) and import it from there"
    )


@pytest.mark.parametrize(
    "text",
    ["def later():\n    from own_util import SIDE\n", "import helper\n", "import own_util.part\n"],
    ids=["inside a function", "by another file beside it", "as a package"],
)
def test_an_import_anywhere_in_its_own_files_is_seen(two_folders, text) -> None:
    run_file(two_folders / "old" / "mine.py")
    (two_folders / "new" / "helper.py").write_text("import own_util\n")
    (two_folders / "new" / "mine.py").write_text(text)
    with pytest.raises(UsageError, match="imports own_util"):
        run_file(two_folders / "new" / "mine.py")


@pytest.mark.parametrize("text", ["SIDE = 'new'\n", "from . import own_util\n"], ids=["not imported", "of a package"])
def test_a_module_of_another_folder_harms_no_file_that_does_not_mean_it(two_folders, text) -> None:
    run_file(two_folders / "old" / "mine.py")
    (two_folders / "new" / "mine.py").write_text(text)
    if "from ." in text:
        (two_folders / "new" / "__init__.py").touch()
    run_file(two_folders / "new" / "mine.py")


def test_a_file_may_run_twice_and_find_its_own_modules_again(two_folders) -> None:
    for _ in range(2):
        assert run_file(two_folders / "old" / "mine.py")[0].SIDE == "old"
