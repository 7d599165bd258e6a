"""What a process is made of: any edit shows, and what was imported after the look is vouched for by a second one."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from harness.program import sources
from harness.program.sources import installation, note, read_sources

LOADED = ("sys", "harness", "harness.program", "harness.program.sources")
"""What a process has loaded that looks at its files in time."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages of ours that a test may edit, and a torch of two files."""
    for package in ("harness", "reference"):
        (tmp_path / package / "deep").mkdir(parents=True)
        (tmp_path / package / "deep" / "module.py").write_text("x = 1\n")
    (tmp_path / "harness" / "costs.json").write_text("{}\n")
    torch = tmp_path / "site" / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").write_text("")
    (torch / "lib" / "libtorch.so.2").write_bytes(b"code")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "_at_start", None)
    spec = types.SimpleNamespace(origin=str(torch / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "harness/deep/module.py",
        "harness/costs.json",
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


@pytest.mark.parametrize("module", ["torch", "reference.step", "harness.execute.runs"])
def test_a_process_that_looks_only_after_it_imported_something_vouches_for_nothing(module: str, own: Path) -> None:
    note((*LOADED, module))
    assert installation() is None
