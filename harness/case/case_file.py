"""A case as a file of JSON: what `bitproof shrink` leaves, and what `--case` reads."""

from __future__ import annotations

import json
from pathlib import Path

from harness.case import Case
from harness.checked import parse
from harness.errors import CaseError

LARGEST = 1 << 20
"""Bytes. A case takes two thousand."""


def read_case(path: Path) -> Case:
    """Read a case, in the form of `Case.to_dict`. Raises CaseError for a file that holds none."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        values = parse(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CaseError(
            "the file of a case cannot be read", expected="a case as JSON", found=found, where=str(path)
        ) from error
    try:
        return Case.from_dict(values)
    except CaseError as error:
        error.where = str(path)
        raise


def case_text(case: Case) -> str:
    """The inverse of `read_case`."""
    return json.dumps(case.to_dict(), indent=1) + "\n"
