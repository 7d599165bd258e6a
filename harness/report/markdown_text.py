"""Escape untrusted text for Markdown. Every Markdown form of a report uses these functions.

Characters that could start HTML, links, pictures, code or tables are escaped. Characters that GitHub interprets even
when escaped, such as `@`, are put into a `<span>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from bitproof.harness.printable import one_line, printable

# Characters that Markdown interprets, only at positions at which it does: a bracket of a link, an underscore at the
# edge of a word.
_ESCAPED = re.compile(r"[\\`*|~$]|\](?=[(\[:])|\[(?=[\^\[])|^\[(?=[ xX]\])|(?<![^\W_])_+|_+(?![^\W_])")
_REFERENCES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# Characters that GitHub interprets after rendering, in users, issues, emoji names and addresses. A backslash does not
# help there, as rendering removes it.
_PARTED = re.compile(r"[@#](?=\w)|:(?=[\w+-]+:)|/(?=/)|(?<=\bwww)\.", re.IGNORECASE)
# The beginnings of lists, headings and rules.
_FIRST = re.compile(r"^(?:[-+=#](?=[-+=#\s]|$)|\d{1,9}(?=[.)](?:\s|$)))")
_TOKENS = re.compile("|".join(f"({part.pattern})" for part in (_ESCAPED, _PARTED)) + "|([&<>])", re.IGNORECASE)


def inline(text: Any) -> str:
    """Escape a text as a single line of a paragraph, a heading or a cell."""
    found = one_line(str(text))
    # A text must not begin a list or a heading. At the beginning of a list item, a backslash goes before a sign, but
    # after a number: `1\.`.
    first = _FIRST.match(found)
    head = "" if first is None else found[: first.end()] + "\\" if first.group().isdigit() else "\\" + first.group()
    return head + _TOKENS.sub(_escape, found[first.end() if first else 0 :])


def _escape(found: re.Match[str]) -> str:
    # The groups of _TOKENS: only one of them matches.
    escaped, parted, referred = found.groups()
    if escaped is not None:
        return "".join(f"\\{character}" for character in escaped)
    return f"<span>{parted}</span>" if parted is not None else _REFERENCES[referred]


def code_block(text: str) -> str:
    """Return a text as a code block. The fence around it is longer than any sequence of backticks in the text."""
    code = printable(text)
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{code}\n{fence}"


def folded(summary: str, body: str) -> str:
    """Return a collapsible block of Markdown. `summary` is the line that is always visible."""
    return f"<details>\n<summary>{inline(summary)}</summary>\n\n{body}\n\n</details>"


def table_of(headers: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table. Cells that are `Strong` texts are bold."""
    from tabulate import tabulate  # here: commands load this module before they start a host

    cells = [[_cell(value) for value in row] for row in rows]
    return tabulate(cells, [_cell(header) for header in headers], tablefmt="pipe", disable_numparse=True)


class Strong(str):
    """A text that `table_of` makes bold."""


def _cell(value: Any) -> str:
    return strong(value) if isinstance(value, Strong) else inline(value)


def strong(text: str) -> str:
    return f"**{inline(text)}**" if text.strip() else ""


def rows_of(headers: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table whose columns are not aligned by spaces, for pages that people edit."""
    lines = [headers, *rows]
    head, *body = ["| " + " | ".join(map(_cell, each)) + " |" for each in lines]
    return [head, "|" + "---|" * len(headers), *body]
