"""A program that torch.export saved, read without running anything that the file holds.

torch's own reader falls back on pickle for tensors that its safe reader does not take, rebuilds objects of any class,
loads compiled code, and hands expressions over sizes to a parser that evaluates them. So the archive is looked at
first, by torch's reader of archives, in memory, and refused where any of that would happen. What is left are tensors,
numbers, and names of operators: each is looked up among the known ones before it is called.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from bitproof.harness.errors import UsageError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.torch_compat import archive_files

LARGEST = 1 << 33
"""Bytes of a file."""

_SYMBOL = re.compile(r"Symbol\('[suz]\d+'(, [a-z]+=(True|False))*\)|\b[suz]\d+\b")
_POWER = re.compile(r"Pow\(N, Integer\(\d\)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SUMS = {"N", "Add", "Mul", "Integer"}
_PLAIN = re.compile(
    r"(archive_format|archive_version|byteorder|\.data/(serialization_id|version)|\.format_version|\.storage_alignment"
    r"|models/[\w.-]+\.json|data/sample_inputs/[\w.-]+\.pt|data/(weights|constants)/[\w.-]+(_config\.json)?)"
)


def read_exported(file: Path) -> ExportedProgram:
    """The program of a file. Raises UsageError for a file that is none, or that more than tensors would be read of."""
    try:
        content = read_plain(file, LARGEST)
    except OSError as error:
        raise _refused(file, str(error.strerror)) from None
    try:
        for name, part in archive_files(content):
            if problem := _problem(name, part):
                raise _refused(file, problem)
        return torch.export.load(io.BytesIO(content))
    except UsageError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise _refused(file, f"{type(error).__name__}: {reason}") from error


def _problem(name: str, part: bytes) -> str | None:
    """Why a part of an archive is not read, in words; None where it holds what a proof needs and no code."""
    if not _PLAIN.fullmatch(name):
        return f"it holds {name}, which is no tensor"
    if name.startswith("data/sample_inputs/") and part:
        torch.load(io.BytesIO(part), weights_only=True)  # torch's reader would take what this refuses
    if name.startswith("data/constants/custom_obj") or name.startswith("data/constants/opaque_obj"):
        return f"it holds {name}, an object of a class"
    if name.startswith("data/") and name.endswith("_config.json"):
        config = json.loads(part).get("config", {})
        if unsafe := [key for key, told in config.items() if told.get("use_pickle")]:
            return f"it holds {unsafe[0]} as a pickle"
    elif name.startswith("data/") and name.endswith(".pt") and not name.startswith("data/sample_inputs/"):
        return f"it holds {name}, written by an older torch as a pickle"
    if name.startswith("models/"):
        return next((x for x in map(_expression_problem, _expressions(json.loads(part))) if x), None)
    return None


def _expressions(value: Any) -> Iterator[str]:
    """Every expression over sizes, and every name of a symbol that one may be read with."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "expr_str":
                yield str(item)
            if key == "range_constraints" and isinstance(item, dict):
                yield from item
            yield from _expressions(item)
    elif isinstance(value, list):
        for item in value:
            yield from _expressions(item)


def _expression_problem(text: str) -> str | None:
    bare = _POWER.sub("N", _SYMBOL.sub("N", text[:2000]))
    is_sum = re.fullmatch(r"[\w(), *+-]*", bare) and "**" not in bare and {*_NAME.findall(bare)} <= _SUMS
    if is_sum and len(text) <= 2000 and all(len(digits) < 20 for digits in re.findall(r"\d+", bare)):
        return None
    return f"it has a size {text[:80]!r}, which is no sum of products of symbols"


def _refused(file: Path, what: str) -> UsageError:
    return UsageError(
        f"{file} cannot be proved: {what}",
        expected="a file that torch.export.save wrote, of tensors and operators alone",
        found=what,
    )
