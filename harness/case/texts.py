"""The texts that come with bitproof, and how a case names them or a file."""

from __future__ import annotations

from pathlib import Path

PYDOC = "pydoc"
PYDOC_LINES = "pydoc_lines"
ADVERSARIAL = "adversarial"
"""Documents made to show what real text hides; see `reference.data.adversarial_documents`. Weights go with them."""

_TEXTS = (PYDOC, PYDOC_LINES, ADVERSARIAL)


def is_text_of_ours(data: str) -> bool:
    """Whether `batch.data` names a text that comes with bitproof, and no file."""
    return data in _TEXTS


def data_of_file(file: Path) -> str:
    """A file as `batch.data` names it: one that is called as a text of ours is, by ./ before it."""
    return f"./{file}" if is_text_of_ours(str(file)) else str(file)
