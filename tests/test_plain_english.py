"""Turns of phrase that must not come back: in documents, help, errors and reports, and in docstrings and comments.

A sentence names who does something and uses the standard word: "the report states", not "it is told". Code is searched
for texts that are no docstring, since those are what a user reads; of commands docstrings too, which are their help.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("bitproof", "harness", "reference", "cases")
PHRASES = {
    "tell": r"\b(?:told|tells?)\b",  # report, state, list, show, distinguish
    "come to": r"\b(?:comes?|came) to\b",  # the result is
    "what was read says": r"\bwhat was read says\b",  # not a valid ... file
    "that shall": r"\bthat shall\b",
    "how-manieth": r"\bhow-?manieth\b",  # index
    "by which": r"\bby which\b",
    "of which": r"\bof which\b",  # whose, or a sentence of its own
    "for itself": r"\bfor itself\b",  # independently
    "anew": r"\banew\b",  # again
    "nobody": r"\b(?:nobody|somebody|whoever)\b",  # name the actor, or use the passive voice
    "what came of": r"\bwhat came of\b",  # the result
    "as it stands": r"\bas (?:it|they) stands?\b",  # unchanged
    "held against": r"\b(?:held|holds?) against\b",  # compared with
    "lies otherwise": r"\blies? otherwise\b",  # has another layout
    "is handed": r"\b(?:is|are|was|were) handed\b",  # takes, gets
    "says of": r"\b(?:says?|said) of\b",  # facts about
}
ALLOWED_IN_DOCS = {"nobody": 1}  # the words of an assumption that certificates hold
ALLOWED_IN_CODE = {"nobody": 1}  # the same words, in the checker
ALLOWED_IN_COMMENTS: dict[str, int] = {}


def phrases_in(texts: Iterable[str]) -> Counter[str]:
    """How often each phrase stands in some texts."""
    found: Counter[str] = Counter()
    for text in texts:
        for name, pattern in PHRASES.items():
            found[name] += len(re.findall(pattern, text, re.IGNORECASE))
    return found


def prose_of(page: str) -> str:
    """A page without its blocks, which show what commands print, and without code between backticks."""
    return re.sub(r"^```.*?^```$|`[^`\n]+`", "", page, flags=re.MULTILINE | re.DOTALL)


def texts_of(source: str) -> Iterator[str]:
    """The texts in a file of Python that are no docstring."""
    tree = ast.parse(source)
    unread = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unread:
            yield node.value


def help_of(source: str) -> Iterator[str]:
    """The docstrings of a file's functions: of a command, they are its help."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def code_texts() -> Iterator[str]:
    """Texts of all code, and the help of all commands."""
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text()
            yield from texts_of(source)
            if file.parent.name == "cli":
                yield from help_of(source)


def comments_of(source: str) -> Iterator[str]:
    """The docstrings and comments of a file of Python, each without line breaks and code between backticks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield prose_of(" ".join(node.value.value.split()))
    yield " ".join(re.findall(r"(?:^|^ *| {2})# (.*)$", source, re.MULTILINE))


def comment_texts() -> Iterator[str]:
    """The docstrings and comments of all code."""
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            yield from comments_of(file.read_text())


def doc_texts() -> Iterator[str]:
    """The prose of all pages but the changelog, which quotes what was."""
    for page in (*ROOT.glob("*.md"), ROOT / "reports" / "README.md", *(ROOT / "docs").rglob("*.md")):
        if page.name != "CHANGELOG.md":
            yield prose_of(page.read_text())


def wrong(found: Counter[str], allowed: dict[str, int]) -> list[str]:
    """What stands more often than it may, and what is allowed more often than it stands."""
    problems = []
    for name in PHRASES:
        count, limit = found[name], allowed.get(name, 0)
        if count > limit:
            problems.append(f"{name!r} stands {count} times, allowed are {limit}: use the standard word")
        elif limit > count:
            problems.append(f"{name!r} stands {count} times: allow no more than that")
    return problems


def test_documents_use_no_phrase_more_often_than_they_may():
    assert wrong(phrases_in(doc_texts()), ALLOWED_IN_DOCS) == []


def test_errors_help_and_reports_use_no_phrase_more_often_than_they_may():
    assert wrong(phrases_in(code_texts()), ALLOWED_IN_CODE) == []


def test_docstrings_and_comments_use_no_phrase_more_often_than_they_may():
    assert wrong(phrases_in(comment_texts()), ALLOWED_IN_COMMENTS) == []


def test_a_phrase_is_found_in_prose_in_an_error_and_in_help_and_not_in_what_is_code():
    page = "It is told.\n```\nshown: told\n```\nThe field `told` tells.\n"
    source = 'def command():\n    """Tell."""\n    raise E(f"what was read says {x}", told=1)\n'
    assert phrases_in([prose_of(page)])["tell"] == 2
    assert phrases_in(texts_of(source)) == Counter({"what was read says": 1})
    assert phrases_in(help_of(source))["tell"] == 1
    comments = 'x = 1  # what\n# came of it\ndef f():\n    """Whoever\n    asks."""\n'
    assert phrases_in(comments_of(comments)) == Counter({"what came of": 1, "nobody": 1})


def test_a_count_above_what_is_allowed_is_wrong_and_so_is_an_allowance_that_did_not_shrink():
    found = Counter({"tell": 3, "anew": 1})
    assert wrong(found, {"tell": 3, "anew": 1}) == []
    assert [*map(len, (wrong(found, {"tell": 2, "anew": 1}), wrong(found, {"tell": 3, "anew": 2})))] == [1, 1]
