"""The files that a user's file is made of, read from what it imports."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from bitproof.harness.powers.shrink.copied_files import own_files


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_file_is_made_of_what_it_imports_from_beside_it_however_far_and_needs_what_is_installed(
    tmp_path: Path,
) -> None:
    files = {
        "mine.py": "import os\nimport torch\nimport torch.nn as nn\nfrom parts import layers\n\ndef plain(): ...\n",
        "parts/__init__.py": "",
        "parts/layers.py": "def norm():\n    from .sizes import EPS\n    from sub.deep import f\n",
        "parts/sizes.py": "EPS = 1\n",
        "sub/deep.py": "import missing_from_here\n",
        "unused.py": "import mine\n",
    }
    written(tmp_path, files)
    found = own_files({f"{tmp_path}/mine.py:plain": tmp_path / "mine.py"})
    assert found.texts == {name: text for name, text in files.items() if name != "unused.py"}
    assert found.names == {f"{tmp_path}/mine.py:plain": "mine.py:plain"}
    assert found.needs == [f"torch {version('torch')}"]


def test_a_file_of_a_package_keeps_its_place_and_two_folders_do_not_mix(tmp_path: Path) -> None:
    files = {"one/p/__init__.py": "", "one/p/a.py": "from . import b\n", "one/p/b.py": "X = 1\n", "two/p.py": "X = 2\n"}
    written(tmp_path, files)
    found = own_files({"a:make": tmp_path / "one/p/a.py", "p:make@before=chunk": tmp_path / "two/p.py"})
    assert found.names == {"a:make": "p/a.py:make", "p:make@before=chunk": "1/p.py:make@before=chunk"}
    assert set(found.texts) == {"p/__init__.py", "p/a.py", "p/b.py", "1/p.py"}


@pytest.mark.parametrize("text", ["def (", None])
def test_what_is_no_python_is_raised(tmp_path: Path, text: str | None) -> None:
    if text:
        written(tmp_path, {"mine.py": text})
    with pytest.raises((SyntaxError, OSError)):
        own_files({"mine.py:make": tmp_path / "mine.py"})
