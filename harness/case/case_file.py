"""Read and write a case as a file of JSON, for `--case` and `bitproof shrink`."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.case.case import are_foreign, file_of, script_of
from bitproof.harness.case.texts import data_of_file, is_text_of_ours
from bitproof.harness.errors import CaseError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.validate import parse

LARGEST = 1 << 20
"""The most bytes in the file of a case. A case takes two thousand."""

LONGEST_CHAIN = 50
"""The longest chain of case files that are `like` each other."""


def read_case(path: Path, known: Callable[[], Sequence[Case]] = tuple) -> Case:
    """Read a case from a JSON file, in the form of `Case.to_dict`. Raises CaseError for an invalid file.

    - `"like"` takes missing fields from another case: the name of a case in `known`, or another file. Example:
      `{"like": "moe_seq", "steps": 2}`.
    - `family` is by default the file's name.
    - `ep` is by default 1 if both systems are a user's trainers.
    - File names are relative to the file's folder, or else to the working directory.
    """
    values = _fields_of_file(path, known, ())
    try:
        # JSON that is no object goes to `from_dict` unchanged, which refuses it with a better error.
        return Case.from_dict(_with_defaults(values, path) if isinstance(values, dict) else values)
    except CaseError as error:
        error.where = str(path)
        raise


def _fields_of_file(path: Path, known: Callable[[], Sequence[Case]], through: tuple[Path, ...]) -> Any:
    try:
        values = parse(read_plain(path, LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CaseError(
            "the file of a case cannot be read", expected="a case as JSON", found=found, where=str(path)
        ) from error
    if not isinstance(values, dict):
        return values
    # Before the other case is read: paths in each file are relative to that file.
    values = _with_paths_from_here(path, values)
    if (like := values.pop("like", None)) is None:
        return values
    # The case is named after its file, not after the case that it is like, unless it states a name.
    return _merged(_fields_of_like(like, path, known, (*through, _real(path))), {"name": path.stem} | values)


def _fields_of_like(like: Any, path: Path, known: Callable[[], Sequence[Case]], through: tuple[Path, ...]) -> Any:
    if isinstance(like, str) and like.endswith(".json"):
        other = path.parent / like
        # Real paths, since a link gives a file a second name.
        if _real(other) in through:
            raise CaseError(
                "case files are like each other in a ring", expected="one that stands by itself", where=str(path)
            )
        if len(through) >= LONGEST_CHAIN:
            raise CaseError(
                "case files are like each other in a long chain",
                expected=f"at most {LONGEST_CHAIN} files, each like the next",
                where=str(path),
                fix="state more in the first one",
            )
        return _fields_of_file(other, known, through)
    cases = {case.name: case for case in known()}
    if like not in cases:
        close = difflib.get_close_matches(str(like), cases, n=3)
        raise CaseError(
            "a case is like one that is not there",
            expected=" or ".join(close) if close else "a case's name, as `bitproof list` shows it, or a JSON file",
            found=f"like={like!r}",
            where=str(path),
        )
    return cases[like].to_dict()


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):
        # Reading the path then raises the error.
        return path


def _merged(base: Any, changes: dict[str, Any]) -> dict[str, Any]:
    base = base if isinstance(base, dict) else {}
    # Parts of a case, such as `batch`, are merged field by field; all other values replace those of `base`.
    joined = {name: _merged(base.get(name), each) if isinstance(each, dict) else each for name, each in changes.items()}
    return base | joined


def _with_paths_from_here(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for side in ("reference", "candidate"):
        # A value may have any type here: types are checked when the case is made.
        if script := script_of(str(found.get(side))):
            found[side] = str(script._replace(file=_from_here(path.parent, Path(script.file))))
            continue
        source, colon, factory = str(found.get(side)).rpartition(":")
        if colon and (file := file_of(source)):
            found[side] = f"{_from_here(path.parent, file)}:{factory}"
    batch = found.get("batch")
    data = batch.get("data") if isinstance(batch, dict) else None
    # A text of bitproof is a name, not a path.
    if isinstance(batch, dict) and isinstance(data, str) and not is_text_of_ours(data):
        found["batch"] = batch | {"data": data_of_file(Path(_from_here(path.parent, Path(data))))}
    return found


def _from_here(folder: Path, file: Path) -> str:
    """Return the path, from the working directory, of a file in `folder`; if there is no such file, return `file`
    unchanged.
    """
    there = folder / file
    if file.is_absolute() or not os.path.isfile(there):
        # `os.path.isfile` accepts a name that is too long; `Path.is_file` raises.
        return str(file)
    here = os.path.relpath(there)
    # A path outside the working directory is absolute, not a chain of `..`.
    return str(there.resolve()) if here.startswith(os.pardir) else here


def _with_defaults(values: dict[str, Any], path: Path) -> dict[str, Any]:
    values = {"family": path.stem, **values}
    parallelism = values.get("parallelism", {})
    if isinstance(parallelism, dict) and are_foreign(values.get("reference"), values.get("candidate")):
        values["parallelism"] = {"ep": 1, **parallelism}
        if isinstance(other := values.get("reference_parallelism"), dict):
            values["reference_parallelism"] = {"ep": 1, **other}
    return values


def case_text(case: Case) -> str:
    """Return the text of a JSON file for this case, which `read_case` can read."""
    values = case.stated()
    values["parallelism"]["ep"] = case.parallelism.ep  # the default in a file differs from a case's default
    return json.dumps(values, indent=1) + "\n"
