"""List the texts that come with bitproof, which a case's `batch.data` may name instead of a file."""

from __future__ import annotations

from pathlib import Path

PYDOC = "pydoc"
PYDOC_LINES = "pydoc_lines"
ADVERSARIAL = "adversarial"
"""Documents with features that are rare in real text, such as single bytes (`reference.data.adversarial_documents`).

A case with them also has other initial weights, whose rows differ in scale, so that rounding shows.
"""

_TEXTS = (PYDOC, PYDOC_LINES, ADVERSARIAL)


def is_text_of_ours(data: str) -> bool:
    """Whether `data`, a case's `batch.data`, names a text that comes with bitproof, rather than a file."""
    return data in _TEXTS


def data_of_file(file: Path) -> str:
    """Return the value of `batch.data` for a file: its path. If that is also the name of a text of bitproof, ./ is put
    in front.
    """
    return f"./{file}" if is_text_of_ours(str(file)) else str(file)
