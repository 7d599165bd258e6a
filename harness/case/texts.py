"""Name the texts that come with bitproof, for `batch.data` of a case."""

from __future__ import annotations

from pathlib import Path

PYDOC = "pydoc"
PYDOC_LINES = "pydoc_lines"
ADVERSARIAL = "adversarial"
"""Documents that exercise cases which are rare in real text; see `reference.data.adversarial_documents`. They have
their own weights.
"""

_TEXTS = (PYDOC, PYDOC_LINES, ADVERSARIAL)


def is_text_of_ours(data: str) -> bool:
    """Whether `batch.data` names a text that comes with bitproof, and no file."""
    return data in _TEXTS


def data_of_file(file: Path) -> str:
    """A file's name in `batch.data`. A file with the name of a built-in text gets ./ in front."""
    return f"./{file}" if is_text_of_ours(str(file)) else str(file)
