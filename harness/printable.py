r"""Decide which characters of untrusted text are shown unchanged, and escape the others.

Names, reasons and errors are from reports, recordings, baselines, trainers and libraries, and may contain anything.
Characters that a terminal or a page would act on, instead of showing them, are escaped, such as `\x1b`: control
characters, halves of surrogate pairs, characters that reorder or hide their neighbours, and unassigned characters. Line
ends and tabs stay.

Each output format escapes its own special characters, such as `<` in HTML: `runtime/output` for terminals and CI logs,
`report/markdown_text` for Markdown, jinja2 and ElementTree for HTML and XML.
"""

from __future__ import annotations

import re

_RUN = re.compile(r"[^\n\t]+")
_LINE_END = re.compile(r"\r\n?")


def printable(text: str) -> str:
    """A text of any number of lines, in which characters that a terminal would act on are escaped."""
    if text.isprintable():
        return text
    return _RUN.sub(lambda run: _spelled(run.group()), _LINE_END.sub(_spelled_end, text))


def one_line(text: str) -> str:
    """A text as one printable line: runs of white space become single spaces."""
    return printable(" ".join(text.split()))


def _spelled_end(found: re.Match[str]) -> str:
    r"""A plain line end for Windows' `\r\n`; an escape for a lone `\r`, which would hide the line before it."""
    return "\n" if found.group() == "\r\n" else "\\r"


def _spelled(run: str) -> str:
    if run.isprintable():
        return run
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in run)
