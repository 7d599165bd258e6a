"""The one rule for text of others wherever it is shown: which characters stand for themselves.

Names, reasons and errors come from reports, recordings, baselines, trainers and libraries, and may hold anything. A
character that a reader would obey instead of see is spelled out, as `\\x1b`: control characters, halves of surrogate
pairs, characters that reorder or hide their neighbours, and those that no Unicode assigns. Line ends and tabs stay.

What a form obeys beyond that, such as `<` in HTML, is that form's own: `runtime/output` has what a terminal or the log
of a CI system obeys, `report/markdown_text` what Markdown does, jinja2 and ElementTree know HTML and XML.
"""

from __future__ import annotations

import re

_RUN = re.compile(r"[^\n\t]+")
_LINE_END = re.compile(r"\r\n?")


def printable(text: str) -> str:
    """A text of any number of lines with nothing in it that a terminal would act on."""
    if text.isprintable():
        return text
    return _RUN.sub(lambda run: _spelled(run.group()), _LINE_END.sub(_spelled_end, text))


def one_line(text: str) -> str:
    """A text as one line: runs of white space are one space."""
    return printable(" ".join(text.split()))


def _spelled_end(found: re.Match[str]) -> str:
    """A line end of Windows is one; a carriage return alone would hide the line before it."""
    return "\n" if found.group() == "\r\n" else "\\r"


def _spelled(run: str) -> str:
    if run.isprintable():
        return run
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in run)
