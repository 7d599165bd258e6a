"""A proof as a certificate, and its files: what `harness/certificate/files.py` reads."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.certificate.check import Replay, rejecting
from harness.certificate.data import FORMAT, Answer, Call, Certificate, Graph, Step, Tensor, Term
from harness.certificate.files import MAIN
from harness.machine.describe import torch_version
from harness.prove.answers import PROVED, Proof
from harness.prove.assumptions import assumptions_of


def certificate_of(case: str, proof: Proof) -> Certificate:
    """All that a checker needs of a case's proof."""
    reference, candidate = proof.sides
    graphs = reference.graph, candidate.graph
    whole = Certificate(
        case=case,
        reference=graphs[0],
        candidate=graphs[1],
        steps=_by_call(proof.table.steps, [*reference.num_steps, *candidate.num_steps]),
        answers=tuple(Answer(answer.output, answer.verdict, answer.terms) for answer in proof.answers),
        assumptions=tuple(assumptions_of(proof.table, graphs)),
        environment=(("torch", torch_version() or "unknown"), ("machine", platform.machine())),
    )
    kept = _needed(whole)
    while len(kept) < whole.num_steps:
        whole = _pruned(whole, kept)
        kept = _needed(whole)
    return whole


def _needed(certificate: Certificate) -> set[int]:
    """The steps that the checker needs. Raises RejectedError."""
    replay = Replay(certificate)
    with rejecting():
        replay.run()
    return replay.needed()


def _by_call(steps: Sequence[Step], bounds: Sequence[int]) -> tuple[tuple[Step, ...], ...]:
    """Steps by the call whose term needed them first; `bounds` is how many there are when each call has its term."""
    return tuple(tuple(steps[start:end]) for start, end in zip((0, *bounds), bounds, strict=False))


def _pruned(certificate: Certificate, kept: set[int]) -> Certificate:
    """Without what the search put down and did not need, such as joins that failed halfway: the checker told."""
    places = {old: new for new, old in enumerate(sorted(kept))}
    numbered = enumerate(step for steps in certificate.steps for step in steps)
    moved = iter(
        [
            replace(step, term=_moved(step.term, places), equals=places[step.equals]) if place in kept else None
            for place, step in numbered
        ]
    )
    return replace(
        certificate,
        steps=tuple(
            tuple(step for step in (next(moved) for _ in steps) if step is not None) for steps in certificate.steps
        ),
        answers=tuple(
            replace(x, terms=(places[x.terms[0]], places[x.terms[1]]) if x.verdict == PROVED else (-1, -1))
            for x in certificate.answers
        ),
    )


def _moved(value: Term, places: Mapping[int, int]) -> Term:
    """A term when the terms that it refers to stand elsewhere."""
    found: Term = _map(value, places.__getitem__)
    return found


def _map(value: Any, place: Callable[[int], int]) -> Any:
    """A term, an argument or a size with each reference replaced."""
    match value:
        case ("view" | "out" | "gather" | "reduce" | "item" | "extent" | "draws" | "value" as kind, term, *rest):
            return (kind, place(term), *(_map_sizes(x, place) for x in rest))
        case ("tensor", term, *rest):
            return ("tensor", place(term), *(_map_sizes(x, place) for x in rest))
        case ("cat", terms, dim):
            return ("cat", tuple(map(place, terms)), dim)
        case ("exact", *operator, terms):
            return ("exact", *operator, tuple(map(place, terms)))
        case ("op" | "move" as kind, op, arguments, dtype, shape):
            moved = tuple((name, _map(argument, place)) for name, argument in arguments)
            return (kind, op, moved, dtype, _map_sizes(shape, place))
        case ("list", *items):
            return ("list", *(_map(item, place) for item in items))
        case ("rows", sizes):
            return ("rows", _map_sizes(sizes, place))
        case ("size", *_):
            return _map_sizes(value, place)
    return value


def _map_sizes(value: Any, place: Callable[[int], int]) -> Any:
    if isinstance(value, tuple) and value and value[0] == "size":
        return ("size", *((coefficient, *map(place, symbols)) for coefficient, *symbols in value[1:]))
    return tuple(_map_sizes(item, place) for item in value) if isinstance(value, tuple) else value


# -- files -------------------------------------------------------------------------------------------


def write_certificate(certificate: Certificate, folder: Path) -> None:
    """Write the four files; the main one last, so that a folder that has it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "reference": _graph_text(certificate.reference),
        "candidate": _graph_text(certificate.candidate),
        "steps": _lines([list(map(_step_data, steps)) for steps in certificate.steps]),
    }
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text)
    main = {
        "format": FORMAT,
        "case": certificate.case,
        "answers": [[answer.output, answer.verdict, *answer.terms] for answer in certificate.answers],
        "assumptions": certificate.assumptions,
        "environment": certificate.environment,
        "sha256": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
    }
    (folder / MAIN).write_text(json.dumps(main, indent=1) + "\n")


def _step_data(step: Step) -> list[Any]:
    return [step.term, step.rule, step.equals, *step.hint]


def _lines(items: list[Any]) -> str:
    return "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in items) + "\n]\n"


def _graph_text(graph: Graph) -> str:
    calls = _lines([_call_data(call) for call in graph.calls]).rstrip()
    return f'{{"groups":{json.dumps(graph.groups)},\n"outputs":{json.dumps(graph.outputs)},\n"calls":{calls}}}\n'


def _call_data(call: Call) -> list[Any]:
    place = call.place
    where = [place.module, place.direction, place.chunk, place.source]
    return [call.name, call.op, call.args, _value_data(call.value), call.writes, int(call.random), where]


def _value_data(value: Any) -> Any:
    if isinstance(value, Tensor):
        layout = [value.shape, value.strides, value.offset, value.storage]
        return {"tensor": [value.dtype, value.device, *layout]}
    if isinstance(value, tuple) and value[:1] != ("size",):
        return {"several": [_value_data(item) for item in value]}
    return value
