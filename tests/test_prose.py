"""Habits of prose in docstrings, measured per package: each stays within the range of seven well-known codebases.

The peers are tinygrad, pytest, Hypothesis, attrs, Polygraphy, torchtitan and autoparallel. Three habits make a text
slow to read: a relative clause in place of a noun ("what was sent" for "the message"), "the one that" for a noun, and a
condition or genitive in front ("Where X, Y", "Of the calls, ..."). A synonym such as "whatever" counts like its twin.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

WORDS = {
    "what": re.compile(r"\b(?:what(?:ever)?|whichever|that which)\b", re.IGNORECASE),
    "one": re.compile(r"\bones?\b", re.IGNORECASE),
    "where": re.compile(r"\bwhere\b", re.IGNORECASE),
    "Of": re.compile(r"(?:^|(?<=[.:;]) +)Of "),
    "What": re.compile(r"(?:^|(?<=[.:;]) +)What "),
    "Where": re.compile(r"(?:^|(?<=[.:;]) +)Where "),
}
"""Words, and words that begin a sentence."""
EXAMPLES = re.compile(r"\b(?:for example|for instance|such as)\b|\bexample:|\be\.g\.", re.IGNORECASE)

PEERS = {"what": 1.0, "one": 4.2, "where": 1.9, "Of": 0.0, "What": 1.5, "Where": 0.4}
"""The highest figure of any peer: occurrences per 1,000 words; at the beginning of sentences, per 1,000 sentences."""
FEWEST_EXAMPLES = 0.2
"""The lowest figure of any peer, per 1,000 words."""


class Prose(NamedTuple):
    """The docstrings of a package, with their files and lines; code between backticks is one word."""

    texts: Sequence[tuple[str, str]]

    @property
    def num_words(self) -> int:
        return sum(len(text.split()) for _, text in self.texts)

    @property
    def num_sentences(self) -> int:
        return sum(len(re.split(r"(?<=[.:;])\s+", text)) for _, text in self.texts)

    def places(self, habit: str) -> list[str]:
        """The place of each occurrence of a habit."""
        return [place for place, text in self.texts for _ in WORDS[habit].findall(text)]

    def rate(self, habit: str) -> float:
        """Occurrences per 1,000 words, or per 1,000 sentences for a habit at the beginning of sentences."""
        whole = self.num_sentences if habit[0].isupper() else self.num_words
        return 1000 * len(self.places(habit)) / max(whole, 1)

    def most(self, habit: str, ceiling: float) -> int:
        """The number of occurrences under a ceiling. It is rounded up: a short text may have an occurrence."""
        whole = self.num_sentences if habit[0].isupper() else self.num_words
        return math.ceil(ceiling * whole / 1000)

    @property
    def num_examples(self) -> int:
        return sum(len(EXAMPLES.findall(text)) for _, text in self.texts)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of each docstring of four words or more, attributes' included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = " ".join(re.sub(r"`[^`]*`", "X", node.value.value).split())
            if len(text.split()) >= 4:
                yield node.lineno, text


def prose_of(files: Sequence[Path]) -> Prose:
    found = []
    for file in files:
        found += [(f"{file.relative_to(ROOT)}:{line}", text) for line, text in docstrings(file.read_text())]
    return Prose(found)


def packages() -> dict[str, list[Path]]:
    """The files of each package: each folder of `harness`, the files of `harness` itself, and the other packages."""
    found = {"harness": sorted((ROOT / "harness").glob("*.py"))}
    for folder in sorted((ROOT / "harness").iterdir()):
        if files := sorted(folder.rglob("*.py")):
            found[f"harness/{folder.name}"] = files
    for name in ("bitproof", "cases", "reference"):
        files = sorted((ROOT / name).rglob("*.py"))
        found[name] = [file for file in files if not any(parent.is_symlink() for parent in file.parents)]
    return found


PACKAGES = packages()


@cache
def prose_in(package: str) -> Prose:
    return prose_of(PACKAGES[package])


def beyond(prose: Prose, ceilings: dict[str, float]) -> list[str]:
    """The habits that are more frequent than their ceiling, with the first places of each."""
    return [
        f"{habit!r} {len(places)} times, at most {most}: use a noun, or say `if`; first at {', '.join(places[:5])}"
        for habit, ceiling in ceilings.items()
        if len(places := prose.places(habit)) > (most := prose.most(habit, ceiling))
    ]


@pytest.mark.parametrize("name", PACKAGES)
def test_no_habit_of_a_package_is_more_frequent_than_among_its_peers(name):
    assert beyond(prose_in(name), PEERS) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_gives_as_many_examples_as_its_peers(name):
    assert prose_in(name).num_examples >= math.floor(FEWEST_EXAMPLES * prose_in(name).num_words / 1000)


def test_each_habit_is_counted_in_docstrings_and_not_in_code():
    source = '''"""What it reads. Of these one is `what` we want: where it lies."""
what = "what one"

def f():
    """Where files are:
    Of whichever kind. Such as ones."""
'''
    prose = Prose([(f"file.py:{line}", text) for line, text in docstrings(source)])
    assert {habit: len(prose.places(habit)) for habit in WORDS} == {
        **{"what": 2, "one": 2, "where": 2},
        **{"Of": 2, "What": 1, "Where": 1},
    }
    assert prose.num_examples == 1
    assert prose.places("one") == ["file.py:1", "file.py:5"]


def test_a_habit_above_its_ceiling_is_named_with_its_place_and_rates_round_up():
    prose = Prose([("a.py:1", "What is sent. " + "A word. " * 100)])
    assert [line.split(":")[0] for line in beyond(prose, PEERS)] == []
    assert beyond(prose, {"what": 0.0}) == ["'what' 1 times, at most 0: use a noun, or say `if`; first at a.py:1"]
