"""What can be read of a call's mistakes without running the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitproof.harness.errors import UsageError
from bitproof.harness.user_code.user_file import check_signature


def check(path: Path, text: str, name: str = "make") -> None:
    path.write_text(text)
    check_signature(path, name, "system mine", (0, 2), "case, mesh")


@pytest.mark.parametrize(
    "takes",
    [
        "case, mesh",
        "*arguments",
        "case, *others",
        "",
        "case, mesh, x=1",
        "case, mesh, *, x=1",
        "a, b, /",
        "case=1, mesh=2",
    ],
)
def test_a_function_that_takes_the_arguments_passes(tmp_path: Path, takes: str) -> None:
    check(tmp_path / "a.py", f"def make({takes}): ...\n")


@pytest.mark.parametrize("takes", ["case", "case, mesh, x", "case, mesh, *, x", "*, x"])
def test_a_function_that_does_not_is_refused_with_its_line(tmp_path: Path, takes: str) -> None:
    with pytest.raises(UsageError) as error:
        check(tmp_path / "a.py", f"\ndef make({takes}): ...\n")
    assert str(error.value) == (
        "UsageError: the function make of system mine cannot be called with case, mesh\n"
        "  expected: def make(case, mesh)\n"
        f"  found: def make({takes})\n"
        f"  came from: {tmp_path / 'a.py'}:2"
    )


@pytest.mark.parametrize(
    "text",
    [
        "import functools\n@functools.cache\ndef make(x): ...\n",
        "def make(x): ...\nmake = print\n",
        "def make(x): ...\nfrom os import path as make\n",
        "if True:\n    def make(x): ...\nelse:\n    def make(case, mesh): ...\n",
        "class make:\n    def __init__(self, x): ...\n",
        "make = lambda x: x\n",
    ],
)
def test_what_is_bound_otherwise_is_left_to_the_run(tmp_path: Path, text: str) -> None:
    check(tmp_path / "a.py", text)


def test_a_plain_function_has_only_the_attributes_that_the_file_mentions(tmp_path: Path) -> None:
    check(tmp_path / "a.py", "def make(x): ...\nmake.foo = print\n", "make.foo")
    with pytest.raises(UsageError, match="the function make of system mine has no attribute foo"):
        check(tmp_path / "a.py", "def make(case, mesh): ...\n", "make.foo")


@pytest.mark.parametrize("value", ["3", "'make'", "[print]", "{}", "f'{3}'"])
def test_a_literal_is_no_function(tmp_path: Path, value: str) -> None:
    with pytest.raises(UsageError) as error:
        check(tmp_path / "a.py", f"make = {value}\n")
    assert str(error.value) == (
        "UsageError: make of system mine is no function\n"
        "  expected: def make(case, mesh)\n"
        f"  found: make = {value}\n"
        f"  came from: {tmp_path / 'a.py'}:1"
    )
