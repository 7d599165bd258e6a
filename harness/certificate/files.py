"""Certificates on disk: four JSON files, with the digests of three in the fourth. Reading them executes nothing.

`harness/prove/certify.py` writes them.

certificate.json    the case, answers, assumptions, the environment, and the other files' SHA-256
reference.json      one graph, a call a line
candidate.json      the other
steps.json          terms, rules and hints, a line for each call's
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from harness.certificate.data import FORMAT, Answer, Call, Certificate, Graph, Place, Step, Tensor
from harness.certificate.rules import RejectedError, require

MAIN = "certificate.json"
PARTS = ("reference", "candidate", "steps")


def read_certificate(folder: Path, *, sealed: bool = True) -> Certificate:
    """Read the four files. Raises RejectedError; unless `sealed`, digests may be wrong, which is for tests."""
    try:
        main = _load(folder, MAIN)
        form, case, answers, assumptions, environment, digests = _fields(
            main, "format case answers assumptions environment sha256"
        )
        require(form == FORMAT, f"a certificate of another format than {FORMAT}")
        for name in PARTS if sealed else ():
            digest = hashlib.sha256((folder / f"{name}.json").read_bytes()).hexdigest()
            require(digests[name] == digest, f"{name}.json is not the file that was certified")
        return Certificate(
            case=str(case),
            reference=_graph(_load(folder, "reference.json")),
            candidate=_graph(_load(folder, "candidate.json")),
            steps=tuple(tuple(map(_step, steps)) for steps in _load(folder, "steps.json")),
            answers=tuple(Answer(str(a), str(b), (_whole(c), _whole(d))) for a, b, c, d in answers),
            assumptions=assumptions,
            environment=environment,
        )
    except RejectedError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RejectedError(f"unreadable: {type(error).__name__}: {error}") from error


def _load(folder: Path, name: str) -> Any:
    """A file's content: arrays as tuples, and neither fractions nor truth values, which no part of it has."""

    def refuse(text: str) -> Any:
        raise ValueError(f"the number {text}")

    return _frozen(json.loads((folder / name).read_text(), parse_float=refuse, parse_constant=refuse))


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, bool):
        raise ValueError("a truth value")
    return value


def _fields(value: Any, names: str) -> list[Any]:
    require(isinstance(value, dict) and sorted(value) == sorted(names.split()), f"expected the fields {names}")
    return [value[name] for name in names.split()]


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _step(value: Any) -> Step:
    term, rule, equals, *hint = value
    return Step(term, str(rule), _whole(equals), tuple(hint))


def _graph(value: Any) -> Graph:
    groups, outputs, calls = _fields(value, "groups outputs calls")
    returned = tuple((str(name), _whole(place)) for name, place in outputs)
    return Graph(tuple(map(_call, calls)), returned, tuple((str(name), ranks) for name, ranks in groups))


def _call(value: Any) -> Call:
    name, op, args, result, writes, random, place = value
    require(random in (0, 1) and len(dict(args)) == len(args), f"call {name} is malformed")
    return Call(str(name), str(op), args, _value(result), writes, bool(random), Place(*place))


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "several" in value:
        return tuple(map(_value, _fields(value, "several")[0]))
    dtype, device, shape, strides, offset, storage = _fields(value, "tensor")[0]
    require(len(shape) == len(strides), "a tensor has not as many strides as dims")
    return Tensor(str(dtype), str(device), shape, strides, offset, _whole(storage))
