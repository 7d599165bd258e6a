"""What `batch.data` names: a text that comes with bitproof, or a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitproof.harness.case.texts import data_of_file, is_text_of_ours


@pytest.mark.parametrize("name", ["pydoc", "pydoc_lines", "adversarial"])
def test_a_file_that_is_called_as_a_text_of_ours_is_named_otherwise(name: str) -> None:
    assert is_text_of_ours(name) and not is_text_of_ours(f"./{name}")
    assert data_of_file(Path(f"./{name}")) == f"./{name}"
    assert data_of_file(Path("folder", name)) == f"folder/{name}"
    assert data_of_file(Path("text.txt")) == "text.txt"
