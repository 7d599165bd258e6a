"""Lines of source are shown so that a terminal or an editor opens them from the working directory."""

from __future__ import annotations

import sys

import pytest
from rich.text import Text

from bitproof.harness.report.console import SafeConsole
from bitproof.harness.report.source_lines import shown_line


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """home/me/exp/{old,new}/train.py, a package beside, and exp/new as the working directory."""
    for name in ("old/train.py", "new/train.py", "new/a/b/c/d.py", "new/x/same.py", "new/y/same.py"):
        path = tmp_path / "home/me/exp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    package = tmp_path / "site-packages/tool/models/bert/bert.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.chdir(tmp_path / "home/me/exp/new")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    return tmp_path


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        ("me/exp/new/train.py:14", "train.py:14"),
        ("exp/old/train.py:14", "{tree}/home/me/exp/old/train.py:14"),
        ("b/c/d.py:1", "a/b/c/d.py:1"),
        ("models/bert/bert.py:9", "tool/models/bert/bert.py:9"),
        ("same.py:3", "same.py:3"),
        ("no/such/file.py:3", "no/such/file.py:3"),
        ("../new/train.py:14", "../new/train.py:14"),
        ("train.py", "train.py"),
        (None, ""),
    ],
)
def test_a_line_is_shown_from_the_working_directory_else_whole_and_as_it_is_kept_if_no_one_file_fits(tree, kept, shown):
    assert shown_line(kept) == shown.format(tree=tree)


class Terminal:
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return True


@pytest.mark.parametrize(("term", "has_links"), [("xterm-256color", True), ("dumb", False)])
def test_a_terminal_gets_links_to_lines_of_files_that_are_here_and_to_nothing_else(tree, monkeypatch, term, has_links):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    stream = Terminal()
    SafeConsole(stream).print(Text("to blame: mul (train.py:14), not gone.py:3", style="link https://a.b"))
    assert (f"{(tree / 'home/me/exp/new/train.py').as_uri()}\x1b\\train.py:14" in stream.text) == has_links
    assert "gone.py:3" in stream.text and "a.b" not in stream.text
