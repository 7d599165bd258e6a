"""Turns a proof into a certificate, and writes the files that `harness/certificate/files.py` reads."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.case.case_file import case_text
from bitproof.harness.certificate.assumptions import assumed
from bitproof.harness.certificate.check import check_calls
from bitproof.harness.certificate.data import FORMAT, Call, Certificate, Graph, ProofStep, Subject, Tensor, terms_in
from bitproof.harness.certificate.errors import rejecting
from bitproof.harness.certificate.files import FILES, MAIN, SUMS, digests_of, sums_of
from bitproof.harness.certificate.rules import Terms, cat_of_neighbours
from bitproof.harness.prove.answers import Proof
from bitproof.harness.runtime.sources import own_digest
from bitproof.harness.torch_versions import torch_version


def subject_of(case: Case, proof: Proof, extra_passes: tuple[str, ...] = (), *, precompiled: bool = False) -> Subject:
    """A proof's subject: the case, and this process's versions and settings, with which it made the graphs."""
    return Subject(
        case=case_text(case),
        code=own_digest(),
        torch=torch_version() or "unknown",
        machine=platform.machine(),
        outputs=tuple(name for name, _ in proof.sides[0].graph.outputs),
        extra_passes=extra_passes,
        precompiled=int(precompiled),
    )


def certificate_of(case: str, proof: Proof, subject: Subject | None = None) -> Certificate:
    """Everything that a checker needs from a case's proof. Raises RejectedError if the checker would not accept it."""
    graphs = proof.sides[0].graph, proof.sides[1].graph
    whole = Certificate(
        case=case,
        reference=graphs[0],
        candidate=graphs[1],
        steps=tuple(proof.table.steps),
        answers=tuple((answer.output, answer.verdict) for answer in proof.answers),
        assumptions=assumed(graphs, proof.table.used()),
        subject=subject,
    )
    needed = _needed(whole)
    places = {old: new for new, old in enumerate(needed)}
    return replace(whole, steps=tuple(_moved(whole.steps[place], places) for place in needed))


class _Recorded(Terms):
    """The checker's terms, which record the look-ups of each step's check."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()
        self.behind: list[set[int]] = []

    def add(self, step: ProofStep) -> None:
        """Check a step; it depends on its term's parts, and on the terms looked up."""
        self.found = set()
        super().add(step)
        self.behind.append({*terms_in(step.term), *self.found, step.equals} - {len(self.behind)})

    def find(self, *term: object) -> int:
        """Look a term up."""
        self.found.add(self.places[term])
        return super().find(*term)


def _needed(certificate: Certificate) -> list[int]:
    """The steps that the checker needs to derive all calls and to check these steps; leaves out abandoned joins."""
    terms = _Recorded()
    with rejecting():
        for step in certificate.steps:
            terms.add(step)
        terms.found = set()
        check_calls(certificate, terms)
    needed, stack = set(), list(terms.found)
    while stack:
        place = stack.pop()
        if place not in needed:
            needed.add(place)
            stack += terms.behind[place]
    return sorted(needed)


def _moved(step: ProofStep, places: Mapping[int, int]) -> ProofStep:
    """A step with its references moved to the terms' new indices."""
    hint = step.hint
    if step.rule == cat_of_neighbours.__name__:
        hint = (hint[0], places[hint[1]])
    return replace(step, term=_map(step.term, places.__getitem__), equals=places[step.equals], hint=hint)


def _map(value: Any, place: Callable[[int], int]) -> Any:
    """Replace each reference in a term, an argument or a size."""
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
    """Write the files; the main one and the digests last, so that a folder that has these is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = contents_of(certificate)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / SUMS).write_text(sums_of({name: contents[name] for name in FILES}))


def contents_of(certificate: Certificate) -> dict[str, bytes]:
    """The files' contents by name, without the digests; the main one last."""
    steps = _lines([_step_data(step) for step in certificate.steps])
    texts = _graph_text(certificate.reference), _graph_text(certificate.candidate), steps
    contents = {name: text.encode() for name, text in zip(FILES[1:], texts, strict=True)}
    main = {
        "format": FORMAT,
        "case": certificate.case,
        "files": digests_of(contents),
        "answers": certificate.answers,
        "assumptions": certificate.assumptions,
        "subject": certificate.subject and asdict(certificate.subject),
    }
    return {**contents, MAIN: (json.dumps(main, indent=1) + "\n").encode()}


def _lines(items: list[Any]) -> str:
    return "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in items) + "\n]\n"


def _graph_text(graph: Graph) -> str:
    calls = _lines([_call_data(call) for call in graph.calls]).rstrip()
    return f'{{"outputs":{json.dumps(graph.outputs)},\n"calls":{calls}}}\n'


def _step_data(step: ProofStep) -> list[Any]:
    return [step.term, step.rule, step.equals, *([step.hint] if step.hint else [])]


def _call_data(call: Call) -> list[Any]:
    return [call.name, call.op, call.args, _value_data(call.value), call.writes, int(call.random), call.place]


def _value_data(value: Any) -> Any:
    if isinstance(value, Tensor):
        layout = [value.shape, value.strides, value.offset, value.storage]
        return {"tensor": [value.dtype, value.device, *layout]}
    if isinstance(value, tuple) and value[:1] != ("size",):
        return {"several": [_value_data(item) for item in value]}
    return value
