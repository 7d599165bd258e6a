"""What is said of the package autoparallel: the one meant, another of its name, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitproof.harness.placement.upstream import installed, refuse_upstream


@pytest.mark.parametrize(
    ("modules", "is_meant", "text"),
    [
        (None, None, "and it is not installed"),
        ([], False, "and the package of that name is another one"),
        (["api"], False, "and the package of that name is another one"),
        (["api", "optimize_sharding"], True, "autoparallel is installed, and its placements cannot be read yet"),
    ],
)
def test_the_package_is_told_by_its_modules_and_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: list[str] | None, is_meant: bool | None, text: str
) -> None:
    if modules is not None:
        (tmp_path / "autoparallel").mkdir()
        for name in ("__init__", *modules):
            (tmp_path / "autoparallel" / f"{name}.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
    assert installed() is is_meant
    assert text in str(refuse_upstream()) and str(refuse_upstream()).startswith("MachineError: NOT RUN: ")
