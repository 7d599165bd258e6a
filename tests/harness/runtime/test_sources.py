"""What a process is made of: any edit shows, and what was imported after the look is vouched for by a second one."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import py_compile
import sys
import types
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from bitproof.harness.runtime import sources
from bitproof.harness.runtime.sources import (
    Installation,
    Later,
    digest_of_loaded,
    installation,
    note,
    read_sources,
    runs_its_text,
    start_up_code,
    torch_digest,
)
from bitproof.harness.runtime.text_loader import TextLoader

LOADED = ("sys", "bitproof", "bitproof.harness", "bitproof.harness.runtime", "bitproof.harness.runtime.sources")
"""What a process has loaded that looks at its files in time."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages of ours that a test may edit, and a torch of two files."""
    for package in ("harness", "reference"):
        (tmp_path / package / "deep").mkdir(parents=True)
        (tmp_path / package / "deep" / "module.py").write_text("x = 1\n")
    (tmp_path / "harness" / "costs.json").write_text("{}\n")
    (tmp_path / "harness" / "include").mkdir()
    (tmp_path / "harness" / "include" / "data").write_text("1\n")
    torch = tmp_path / "site" / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").write_text("")
    (torch / "lib" / "libtorch.so.2").write_bytes(b"code")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "at_start", None)
    monkeypatch.setattr(sources, "loaded_at_start", frozenset())
    spec = types.SimpleNamespace(origin=str(torch / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "harness/deep/module.py",
        "harness/costs.json",
        "harness/include/data",
        "reference/deep/module.py",
        "site/torch/__init__.py",
        "site/torch/lib/libtorch.so.2",
    ],
)
def test_an_edit_of_any_file_shows(name: str, own: Path) -> None:
    before = read_sources()
    assert before.are_untouched()
    file = own / name
    file.write_bytes(file.read_bytes()[:-1] + b"#")  # of the same length, or longer by one
    assert read_sources().digest != before.digest and not before.are_untouched()


def test_a_file_that_was_edited_and_put_back_is_not_untouched_though_its_content_is(own: Path) -> None:
    before, file = read_sources(), own / "harness" / "deep" / "module.py"
    content, times = file.read_bytes(), file.stat()
    file.write_text("x = 2\n")
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read_sources().digest == before.digest, "graphs that were made before count again"
    assert not before.are_untouched(), "and what was imported between is not known"


def test_a_file_that_came_or_went_shows_and_compiled_python_does_not(own: Path) -> None:
    before = read_sources()
    cached = own / "harness" / "deep" / "__pycache__"
    cached.mkdir()
    (cached / "module.pyc").write_bytes(b"compiled")
    assert before.are_untouched()
    (own / "harness" / "more.py").write_text("")
    assert read_sources().digest != before.digest


def test_a_process_that_did_not_look_at_its_start_vouches_for_nothing(own: Path) -> None:
    assert installation() is None
    note(LOADED)
    found = installation()
    assert found is not None and found.sources == read_sources() and found == installation()


def test_a_module_of_others_counts_by_its_file_and_one_that_changed_since_the_start_spoils_all(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, file = types.ModuleType("somebodys"), own / "somebodys.py"
    file.write_text("")
    module.__file__ = str(file)
    monkeypatch.setattr(sources.time, "time", lambda: file.stat().st_ctime + 10)
    note(LOADED)
    without = installation()
    monkeypatch.setitem(sys.modules, "somebodys", module)
    with_it = installation()
    assert without is not None and with_it is not None and with_it.others != without.others
    monkeypatch.setattr(sources.time, "time", lambda: file.stat().st_ctime - 10)
    note(LOADED)
    assert installation() is None


@pytest.mark.parametrize("module", ["torch", "bitproof.reference.step", "bitproof.harness.execute.host.runners"])
def test_a_process_that_looks_only_after_it_imported_something_vouches_for_nothing(module: str, own: Path) -> None:
    note((*LOADED, module))
    assert installation() is None


@pytest.fixture
def began(own: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """A process that has looked at its files, of which those that tests make are older."""
    monkeypatch.setattr(sources.time, "time", lambda: 2.0**33)
    monkeypatch.setattr(sources.text_loader, "not_found", set())
    note(LOADED)
    found = installation()
    assert found is not None
    return found


def _load_late(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> Path:
    """A module with compiled code, loaded after the key was made."""
    file = folder / f"{name}.py"
    file.write_text("x = 1\n")
    py_compile.compile(str(file))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    return file


def test_what_is_loaded_later_is_named_with_its_compiled_code_and_must_be_the_same_again(
    began: Installation, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = began.later()
    assert nothing is not None and nothing.would_load_again()
    file = _load_late(monkeypatch, own, "late_one")
    monkeypatch.setattr(sources, "place_of", lambda name: str(file))
    later = began.later()
    assert later is not None
    cached = importlib.util.cache_from_source(str(file))
    assert {reported[0] for reported in later.files} - {reported[0] for reported in nothing.files} == {
        str(file),
        cached,
    }
    assert Later.of(json.loads(json.dumps(asdict(later)))) == later
    assert later.would_load_again()
    for changed in (Path(cached), file):
        content = changed.read_bytes()
        changed.write_bytes(content)
        assert not later.would_load_again(), f"{changed} was written, with the same bytes"
        later = began.later()
        assert later is not None and later.would_load_again()
    monkeypatch.setattr(sources, "place_of", lambda name: "/another/place.py")
    assert not later.would_load_again(), "it would be found elsewhere now"
    monkeypatch.setattr(sources, "place_of", lambda name: str(file))
    assert later.would_load_again()
    Path(cached).unlink()
    assert not later.would_load_again(), "its compiled code is gone"


def test_a_package_that_was_not_there_and_came_is_another_one(
    began: Installation, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.text_loader.not_found.add("an_optional_one")
    monkeypatch.setattr(sources, "place_of", lambda name: None)
    later = began.later()
    assert later is not None and later.found == {"an_optional_one": None} and later.would_load_again()
    monkeypatch.setattr(sources, "place_of", lambda name: str(own / "an_optional_one.py"))
    assert not later.would_load_again()


def test_what_was_loaded_later_from_a_file_that_is_newer_than_the_process_cannot_be_vouched_for(
    began: Installation, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "at_start", (0.0, began.sources))
    _load_late(monkeypatch, own, "late_one")
    assert began.later() is None


def test_an_edit_of_our_files_while_something_is_made_leaves_nobody_to_vouch(began: Installation, own: Path) -> None:
    (own / "harness" / "deep" / "module.py").write_text("x = 3\n")
    assert began.later() is None


def test_a_module_that_ran_from_its_text_counts_without_its_bytecode(
    began: Installation, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _load_late(monkeypatch, own, "late_one")
    monkeypatch.setattr(sources, "place_of", lambda name: str(file))
    monkeypatch.setitem(sources.text_loader.text_digests, str(file), "its text's")
    later = began.later()
    Path(importlib.util.cache_from_source(str(file))).unlink()
    assert later is not None and later.would_load_again() and str(file) in {each[0] for each in later.files}
    file.write_text("x = 2\n")
    assert not later.would_load_again()


def test_a_module_of_ours_that_ran_another_text_than_its_file_holds_is_noticed(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = own / "harness" / "deep" / "module.py"
    for text, expected in ((b"x = 1\n", True), (b"x = 2\n", False)):
        monkeypatch.setattr(sources.text_loader, "text_digests", {str(file): hashlib.sha256(text).hexdigest()})
        assert runs_its_text() is expected


def test_a_module_in_an_archive_counts_by_the_archive(
    began: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, module = tmp_path / "modules.zip", types.ModuleType("zipped")
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr(zipfile.ZipInfo("part/zipped.py"), "x = 1")
    module.__spec__ = importlib.machinery.ModuleSpec("zipped", None, origin=f"{archive}/part/zipped.py")
    module.__spec__.has_location = True
    monkeypatch.setitem(sys.modules, "zipped", module)
    monkeypatch.setattr(sources, "place_of", lambda name: f"{archive}/part/zipped.py")
    later = began.later()
    assert later is not None and later.would_load_again()
    digest = digest_of_loaded(f"{archive}/part/zipped.py")
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr(zipfile.ZipInfo("part/zipped.py"), "x = 2")
    assert not later.would_load_again()
    sources.digest_of_file.cache_clear()
    assert digest != digest_of_loaded(f"{archive}/part/zipped.py") is not None


def test_torchs_files_count_by_their_text_and_its_libraries_by_size(own: Path) -> None:
    text, library = own / "site" / "torch" / "__init__.py", own / "site" / "torch" / "lib" / "libtorch.so.2"
    found = [torch_digest.__wrapped__()]
    os.utime(text, (1, 1))
    assert torch_digest.__wrapped__() == found[0], "another machine has it since another day"
    for file, content in ((text, b"x = 1"), (text, b"x = 2"), (library, b"longer code")):
        file.write_bytes(content)
        found.append(torch_digest.__wrapped__())
    assert len({*found}) == 4


def test_what_python_runs_as_it_starts_counts_by_its_text_and_where_packages_lie_does_not(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(own)])
    monkeypatch.delitem(sys.modules, "sitecustomize", raising=False)  # some distributions of Python have one
    before = start_up_code()
    (own / "__editable__.mine.pth").write_text("import finder; finder.install()\n/mine\n")
    (own / "paths.pth").write_text("/mine\n")
    assert start_up_code() == before
    (own / "patching.pth").write_text("/mine\nimport patches\n")
    seen = []
    for name in ("sitecustomize", "patches"):
        file = own / f"{name}.py"
        file.write_text("import torch\n")
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
    note(("patches", *LOADED))
    for text in ("import torch", "torch = 1"):
        for name in ("sitecustomize", "patches"):
            (own / f"{name}.py").write_text(text)
        sources.digest_of_file.cache_clear()
        seen.append(start_up_code())
    sources.digest_of_file.cache_clear()
    assert seen[0].keys() - before.keys() == {"sitecustomize", "patches", "patching.pth"}
    assert {name for name in seen[0] if seen[0][name] != seen[1][name]} == {"sitecustomize", "patches"}


def test_a_text_that_ran_is_named_though_the_file_holds_another_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources.text_loader, "text_digests", {})
    file = tmp_path / "edited_meanwhile.py"
    file.write_text("x = 1\n")
    loader = TextLoader("edited_meanwhile", str(file))
    loader.get_code("edited_meanwhile")
    ran = digest_of_loaded(str(file))
    file.write_text("x = 2\n")
    assert digest_of_loaded(str(file)) == ran == hashlib.sha256(b"x = 1\n").hexdigest()
