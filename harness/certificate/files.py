"""Certificates on disk: four JSON files, and their SHA-256 as `sha256sum` writes them. Reading executes nothing.

certificate.json    the case, answers, assumptions, the environment
reference.json      one graph, a call a line
candidate.json      the other
steps.json          terms, rules and hints, a line each
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bitproof.harness.certificate.data import FORMAT, Call, Certificate, Graph, Step, Tensor
from bitproof.harness.certificate.rules import rejecting, require

FILES = ("certificate.json", "reference.json", "candidate.json", "steps.json")
MAIN, SUMS = FILES[0], "SHA256SUMS"


def read_certificate(folder: Path, *, sealed: bool = True) -> Certificate:
    """Read the files. Raises RejectedError; unless `sealed`, digests may be wrong, which is for tests."""
    with rejecting():
        main, reference, candidate, steps = (_load(folder / name) for name in FILES)
        require(main["format"] == FORMAT, f"a certificate of another format than {FORMAT}")
        others = {*sums_of(folder).splitlines()} ^ {*(folder / SUMS).read_text().splitlines()} if sealed else ()
        require(not others, f"not what was certified: {', '.join(sorted({line[66:] for line in others}))}")
        about = main["assumptions"], main["environment"]
        rows = tuple(Step(*step) for step in steps)
        return Certificate(main["case"], _graph(reference), _graph(candidate), rows, main["answers"], *about)


def sums_of(folder: Path) -> str:
    """The digests of the files."""
    return "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES)


def _load(file: Path) -> Any:
    return _frozen(json.loads(file.read_text()))


def _frozen(value: Any) -> Any:
    """Arrays as tuples, and neither fractions nor truth values, which no part of a certificate has."""
    if isinstance(value, bool | float):
        raise ValueError(f"the value {value}")
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _graph(value: Any) -> Graph:
    calls = ((name, op, args, _value(result), *rest) for name, op, args, result, *rest in value["calls"])
    return Graph(tuple(Call(*call) for call in calls), value["outputs"])


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return Tensor(*value["tensor"]) if "tensor" in value else tuple(map(_value, value["several"]))
