from __future__ import annotations

import pytest

from bitproof.harness.report.ci.problems import place_of


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A working tree with a file deep in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("src/pkg/models/layers/moe.py", "mine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def test_a_place_is_the_path_from_the_working_trees_root(tree):
    assert place_of("models/layers/moe.py:68") == ("src/pkg/models/layers/moe.py", 68)
    assert place_of(f"{tree.parent.name}/{tree.name}/mine.py:9") == ("mine.py", 9)


def test_a_place_behind_a_link_is_the_files_own(tree):
    (tree / "linked").symlink_to("src/pkg", target_is_directory=True)
    assert place_of("linked/models/layers/moe.py:68") == ("src/pkg/models/layers/moe.py", 68)


def test_a_place_that_two_files_or_none_may_be_stays_as_it_is_reported(tree):
    (tree / "old/models/layers").mkdir(parents=True)
    (tree / "old/models/layers/moe.py").write_text("")
    assert place_of("models/layers/moe.py:68") == ("models/layers/moe.py", 68)
    assert place_of("a/b/c.py:1") == ("a/b/c.py", 1)
    assert place_of("a/[m]*.py:1") == ("a/[m]*.py", 1), "no pattern"


@pytest.mark.parametrize(
    "source", [None, "", "moe.py", "moe.py:0", "../x.py:1", "/etc/x:1", "a\x00b:1", "a" * 300 + ":1"]
)
def test_what_is_no_place_of_the_tree_is_none(source):
    assert place_of(source) == (None, None)
