r"""Escapes characters of untrusted text that could change what a terminal or page shows.

Case names and error messages may come from any file or library. Control characters, lone surrogates, invisible or
reordering characters, and unassigned characters become escapes such as `\x1b`. Line ends and tabs are kept. Each output
format also escapes its own special characters, such as `<` in HTML.
"""

from __future__ import annotations

import re

_RUN = re.compile(r"[^\n\t]+")
_LINE_END = re.compile(r"\r\n?")


def printable(text: str) -> str:
    """Escape the characters of a text that a terminal would act on; line ends and tabs are kept."""
    if text.isprintable():
        return text
    return _RUN.sub(lambda run: _escaped(run.group()), _LINE_END.sub(_escaped_line_end, text))


def one_line(text: str) -> str:
    """Return a text as a single printable line: each run of white space becomes one space."""
    return printable(" ".join(text.split()))


def _escaped_line_end(found: re.Match[str]) -> str:
    # A lone \r would overwrite its line in a terminal.
    return "\n" if found.group() == "\r\n" else "\\r"


def _escaped(run: str) -> str:
    if run.isprintable():
        return run
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in run)
