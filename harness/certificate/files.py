"""Certificates on disk: four JSON files, and their SHA-256 as `sha256sum` writes them. Reading executes nothing.

certificate.json    subject, answers, assumptions, and the digests of the other three
reference.json      one graph, one call per line
candidate.json      the other
steps.json          terms, rules and hints, one step per line

So the digest of certificate.json identifies the whole certificate.
"""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from bitproof.harness.certificate.data import FORMAT, Call, Certificate, Graph, ProofStep, Size, Subject, Tensor
from bitproof.harness.certificate.errors import RejectedError, rejecting, require
from bitproof.harness.files.plain_files import read_plain

FILES = ("certificate.json", "reference.json", "candidate.json", "steps.json")
MAIN, SUMS = FILES[0], "SHA256SUMS"
LARGEST = 1 << 29
"""The largest file in bytes. Those of 61 layers take 65 MB together."""


def read_certificate(folder: Path, *, sealed: bool = True) -> Certificate:
    """Read the files. Raises RejectedError; unless `sealed`, digests may be wrong, which is for tests."""
    with rejecting():
        contents = {name: _content(folder / name) for name in FILES}
        return certificate_in(contents, _content(folder / SUMS).decode() if sealed else None)


def certificate_in(contents: dict[str, bytes], sums: str | None = None) -> Certificate:
    """A certificate of its files' contents. Raises RejectedError, also for other digests than `sums`, where given."""
    with rejecting():
        main = _load(contents[MAIN])
        found = main["format"]
        require(found == FORMAT, f"a certificate of format {found}, which is not {FORMAT}: made by another version")
        if sums is not None:
            own = digests_of(contents)
            lines = {f"{digest}  {name}" for name, digest in own} ^ {*sums.splitlines()}
            sealed = {x for x in own if x[0] != MAIN} ^ {*main["files"]}
            unlike = {line[66:] for line in lines} | {name for name, _ in sealed}
            require(not unlike, f"not what was certified: {', '.join(sorted(unlike))}")
        known = ("format", "case", "files", "answers", "assumptions", "subject")
        require({*main} == {*known}, f"its parts are not {', '.join(known)}")
        reference, candidate, steps = (_load(contents[name]) for name in FILES[1:])
        return Certificate(
            case=_text(main["case"]),
            reference=_graph(reference),
            candidate=_graph(candidate),
            steps=tuple(_step(*step) for step in steps),
            answers=tuple((_text(name), _text(verdict)) for name, verdict in main["answers"]),
            assumptions=tuple(map(_text, main["assumptions"])),
            subject=_subject(main["subject"]),
        )


def digests_of(contents: dict[str, bytes]) -> tuple[tuple[str, str], ...]:
    """The SHA-256 of each file."""
    return tuple((name, hashlib.sha256(content).hexdigest()) for name, content in contents.items())


def sums_of(contents: dict[str, bytes]) -> str:
    """The digests of the files, as `sha256sum` writes them."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests_of(contents))


def _content(file: Path) -> bytes:
    try:
        return read_plain(file, LARGEST)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFBIG):
            raise
        raise RejectedError(f"{file.name}: {error.strerror}") from error


def _load(content: bytes) -> Any:
    return _frozen(json.loads(content.decode(), object_pairs_hook=_unique))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    require(len(found) == len(pairs), lambda: f"a name stands twice: {[name for name, _ in pairs][:8]}")
    return found


_LEAVES = frozenset({int, str, type(None)})


def _frozen(value: Any) -> Any:
    """Arrays as tuples, and neither fractions nor truth values, which no part of a certificate has."""
    if type(value) is list:
        return tuple([x if type(x) in _LEAVES else _frozen(x) for x in value])
    if isinstance(value, bool | float):
        raise ValueError(f"the value {value}")
    return {key: _frozen(item) for key, item in value.items()} if type(value) is dict else value


def _text(value: Any) -> str:
    require(type(value) is str, lambda: f"{str(value)[:80]} is no text")
    return str(value)


def _number(value: Any) -> int:
    require(type(value) is int and value >= 0, lambda: f"{str(value)[:80]} is no number of anything")
    return int(value)


def _subject(value: Any) -> Subject | None:
    if value is None:
        return None
    require({*value} == {field.name for field in fields(Subject)}, "what it is about has other parts")
    require(value["precompiled"] in (0, 1), "precompiled is neither 0 nor 1")
    require(type(value["outputs"]) is type(value["extra_passes"]) is tuple, "outputs or passes are no array")
    return Subject(
        case=_text(value["case"]),
        code=_text(value["code"]),
        torch=_text(value["torch"]),
        machine=_text(value["machine"]),
        outputs=tuple(map(_text, value["outputs"])),
        extra_passes=tuple(map(_text, value["extra_passes"])),
        precompiled=value["precompiled"],
    )


def _step(term: Any, rule: str, equals: int, hint: Any = ()) -> ProofStep:
    require(type(rule) is str and type(hint) is tuple, lambda: f"{str(rule)[:80]} is no rule with a hint")
    return ProofStep(term, rule, equals, hint)


def _graph(value: Any) -> Graph:
    require({*value} == {"outputs", "calls"}, "a graph has other parts than outputs and calls")
    outputs = tuple((_text(name), _number(index)) for name, index in value["outputs"])
    return Graph(tuple(_call(*call) for call in value["calls"]), outputs)


def _call(name: str, op: str, args: Any, value: Any, writes: Any, random: int, place: Any) -> Call:
    names = {argument: None for argument, _ in args}
    is_call = (
        type(name) is str and type(op) is str and random in (0, 1) and all(type(x) is str for x in (*names, *writes))
    )
    is_call &= type(args) is type(writes) is tuple and len(names) == len(args)
    require(is_call, lambda: f"{str(name)[:80]} is no call")
    return Call(name, op, args, _value(value), writes, bool(random), place)


def _value(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        return _size(value)
    [(kind, found)] = value.items()
    if kind == "several":
        require(type(found) is tuple, "several results are no array")
        return tuple(map(_value, found))
    require(kind == "tensor", lambda: f"{kind} is no kind of value")
    dtype, device, shape, strides, offset, storage = found
    is_layout = type(shape) is type(strides) is tuple and len(shape) == len(strides)
    require(is_layout, lambda: f"strides {strides!s:.80} for dims {shape!s:.80}")
    for size in (*shape, *strides, offset):
        _size(size)
    return Tensor(_text(dtype), _text(device), shape, strides, offset, _number(storage))


def _size(value: Any) -> Size:
    """A size, which may depend on data: then it is a sum of products of symbols."""
    if type(value) is int and value >= 0:
        return value
    is_sum = (
        type(value) is tuple
        and value[:1] == ("size",)
        and all(type(n) is int and all(type(name) is str for name in names) for n, *names in value[1:])
    )
    require(is_sum, f"{str(value)[:80]} is no size")
    return value
