"""A case as a file of JSON: what `bitproof shrink` leaves, and what `--case` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.case.case import is_factory
from bitproof.harness.checked import parse
from bitproof.harness.errors import CaseError

LARGEST = 1 << 20
"""Bytes. A case takes two thousand."""


def read_case(path: Path) -> Case:
    """Read a case, in the form of `Case.to_dict`. Raises CaseError for a file that holds none.

    A file that names no family is one of its own. Where both systems are a user's, `ep` is 1 unless it is stated: how
    such trainers lie on the ranks is theirs to say.
    """
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
        return Case.from_dict(_with_defaults(values, path) if isinstance(values, dict) else values)
    except CaseError as error:
        error.where = str(path)
        raise


def _with_defaults(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a file may leave out."""
    values = {"family": path.stem, **values}
    parallelism = values.get("parallelism", {})
    systems = (values.get("reference"), values.get("candidate"))
    if isinstance(parallelism, dict) and all(isinstance(each, str) and is_factory(each) for each in systems):
        values["parallelism"] = {"ep": 1, **parallelism}
    return values


def case_text(case: Case) -> str:
    """The inverse of `read_case`."""
    values = case.stated()
    values["parallelism"]["ep"] = case.parallelism.ep  # what a file leaves out is another default than a case's
    return json.dumps(values, indent=1) + "\n"
