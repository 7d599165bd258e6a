"""Certificates on disk: four JSON files, with the digests of three in the fourth. Reading them executes nothing.

certificate.json    the case, answers, assumptions, the environment, and the other files' SHA-256
reference.json      one graph, a call a line
candidate.json      the other
steps.json          terms, rules and hints, a line each
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from harness.certificate.data import FORMAT, Answer, Call, Certificate, Graph, Step, Tensor
from harness.certificate.rules import rejecting, require

MAIN = "certificate.json"
PARTS = ("reference", "candidate", "steps")


def read_certificate(folder: Path, *, sealed: bool = True) -> Certificate:
    """Read the four files. Raises RejectedError; unless `sealed`, digests may be wrong, which is for tests."""
    with rejecting():
        main, *graphs, steps = (_load(folder / f"{name}.json") for name in ("certificate", *PARTS))
        require(main["format"] == FORMAT, f"a certificate of another format than {FORMAT}")
        for name in PARTS if sealed else ():
            digest = hashlib.sha256((folder / f"{name}.json").read_bytes()).hexdigest()
            require(main["sha256"][name] == digest, f"{name}.json is not the file that was certified")
        reference, candidate = map(_graph, graphs)
        return Certificate(
            main["case"],
            reference,
            candidate,
            tuple(Step(term, rule, equals, tuple(hint)) for term, rule, equals, *hint in steps),
            tuple(Answer(output, verdict, (one, two)) for output, verdict, one, two in main["answers"]),
            main["assumptions"],
            main["environment"],
        )


def _load(file: Path) -> Any:
    """A file's content: arrays as tuples, and neither fractions nor truth values, which no part of it has."""
    return _frozen(json.loads(file.read_text(), parse_float=_refused, parse_constant=_refused))


def _refused(text: str) -> Any:
    raise ValueError(f"the number {text}")


def _frozen(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a truth value")
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _graph(value: Any) -> Graph:
    calls = tuple(
        Call(name, op, args, _value(result), writes, bool(random), place)
        for name, op, args, result, writes, random, place in value["calls"]
    )
    return Graph(calls, value["outputs"], value["groups"])


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return Tensor(*value["tensor"]) if "tensor" in value else tuple(map(_value, value["several"]))
