"""Turns a proof into a certificate, and writes the files that `harness/certificate_checker.py` reads."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bitproof.harness import certificate_checker as checker
from bitproof.harness.case import Case
from bitproof.harness.case.case_file import case_text
from bitproof.harness.certificate_checker import FILES, FORMAT, MAIN, PARTS, SUMS
from bitproof.harness.powers.proofs.prover.answers import Proof
from bitproof.harness.powers.proofs.prover.proof_data import (
    SIDES,
    Call,
    Certificate,
    Graph,
    ProofStep,
    Subject,
    Tensor,
    terms_in,
)
from bitproof.harness.powers.proofs.prover.rules import cat_of_neighbours
from bitproof.harness.runtime.sources import own_digest
from bitproof.harness.torch_versions import torch_version


def subject_of(case: Case, proof: Proof, extra_passes: tuple[str, ...] = (), *, precompiled: bool = False) -> Subject:
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
    """Return the proof of a case as a certificate, with only those steps of the proof that the checker needs.

    Raises RejectedError if the checker does not accept the certificate.
    """
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
    # The kept steps are numbered without gaps, so all references to steps change.
    needed = _needed(whole)
    places = {old: new for new, old in enumerate(needed)}
    return replace(whole, steps=tuple(_renumbered_step(whole.steps[place], places) for place in needed))


def assumed(graphs: Iterable[Graph], rules: Iterable[str]) -> tuple[str, ...]:
    """Return the assumptions of a proof that applied `rules` to `graphs`, as sentences."""
    return tuple(checker.assumed((call.op for graph in graphs for call in graph.calls), rules))


class _LookUps(dict[str, int]):
    """The checker's dictionary from terms to indices, which also records each index that the checker looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def get(self, line: str, default: Any = None) -> Any:
        place = super().get(line, default)
        self.found.add(place)
        return place


def _needed(certificate: Certificate) -> list[int]:
    # The checker itself runs here, with a dictionary of terms that records look-ups: no second list of what rules need.
    contents = contents_of(certificate)
    main, *graphs, steps = (json.loads(contents[name]) for name in FILES)
    # `behind` has, for each step, the earlier steps that it needs.
    state, behind = checker.new_state(), list[set[int]]()
    terms = state["at"] = _LookUps()
    with checker.rejecting():
        for place, (step, own) in enumerate(zip(steps, certificate.steps, strict=True)):
            terms.found = {own.equals, *terms_in(own.term)}
            checker.take_step(state, step)
            behind.append(terms.found - {place})
        terms.found = set()
        sides = [checker.walk(state, graph, side) for graph, side in zip(graphs, SIDES, strict=True)]
        checker.check_answers(main, checker.answers_of(state, sides, graphs))
    # From the terms that calls and answers look up, back to all steps that these depend on.
    needed, stack = set(), list(terms.found)
    while stack:
        place = stack.pop()
        if place not in needed:
            needed.add(place)
            stack += behind[place]
    return sorted(needed)


def _renumbered_step(step: ProofStep, places: Mapping[int, int]) -> ProofStep:
    hint = step.hint
    # No other rule's hint contains a term.
    if step.rule == cat_of_neighbours.__name__:
        hint = (hint[0], places[hint[1]])
    return replace(step, term=_renumbered(step.term, places.__getitem__), equals=places[step.equals], hint=hint)


def _renumbered(value: Any, new_index: Callable[[int], int]) -> Any:
    match value:
        # These begin with a term, and may have sizes with terms in the other fields.
        case ("view" | "out" | "gather" | "reduce" | "item" | "extent" | "draws" | "value" as kind, term, *rest):
            return (kind, new_index(term), *(_renumbered_sizes(x, new_index) for x in rest))
        case ("tensor", term, *rest):
            return ("tensor", new_index(term), *(_renumbered_sizes(x, new_index) for x in rest))
        case ("cat", terms, dim):
            return ("cat", tuple(map(new_index, terms)), dim)
        case ("exact", *operator, terms):
            return ("exact", *operator, tuple(map(new_index, terms)))
        case ("op" | "move" as kind, op, arguments, dtype, shape):
            moved = tuple((name, _renumbered(argument, new_index)) for name, argument in arguments)
            return (kind, op, moved, dtype, _renumbered_sizes(shape, new_index))
        case ("list", *items):
            return ("list", *(_renumbered(item, new_index) for item in items))
        case ("rows", sizes):
            return ("rows", _renumbered_sizes(sizes, new_index))
        case ("size", *_):
            return _renumbered_sizes(value, new_index)
    return value


def _renumbered_sizes(value: Any, new_index: Callable[[int], int]) -> Any:
    # A size is a sum of products, each of a number and terms: ("size", (2, 17, 17), (1, 30)).
    if isinstance(value, tuple) and value and value[0] == "size":
        return ("size", *((coefficient, *map(new_index, symbols)) for coefficient, *symbols in value[1:]))
    return tuple(_renumbered_sizes(item, new_index) for item in value) if isinstance(value, tuple) else value


# -- files -------------------------------------------------------------------------------------------


def write_certificate(certificate: Certificate, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    contents = contents_of(certificate)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / SUMS).write_text(sums_of({name: contents[name] for name in FILES}))


def digests_of(contents: Mapping[str, bytes]) -> tuple[tuple[str, str], ...]:
    """Return (file name, SHA-256 of the content) for each file."""
    return tuple((name, hashlib.sha256(content).hexdigest()) for name, content in contents.items())


def sums_of(contents: Mapping[str, bytes]) -> str:
    """Return the digests of files as text, as `sha256sum` prints them."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests_of(contents))


def contents_of(certificate: Certificate) -> dict[str, bytes]:
    """Return the contents of a certificate's files by name, the main file last. The file of digests is left out."""
    steps = _lines([step_data(step) for step in certificate.steps])
    texts = graph_text(certificate.reference), graph_text(certificate.candidate), steps
    contents = {name: text.encode() for name, text in zip(PARTS, texts, strict=True)}
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


def graph_text(graph: Graph) -> str:
    calls = _lines([call_data(call) for call in graph.calls]).rstrip()
    return f'{{"outputs":{json.dumps(graph.outputs)},\n"calls":{calls}}}\n'


def step_data(step: ProofStep) -> list[Any]:
    return [step.term, step.rule, step.equals, *([step.hint] if step.hint else [])]


def call_data(call: Call) -> list[Any]:
    return [call.name, call.op, call.args, _value_data(call.value), call.writes, int(call.random), call.place]


def _value_data(value: Any) -> Any:
    if isinstance(value, Tensor):
        layout = [value.shape, value.strides, value.offset, value.storage]
        return {"tensor": [value.dtype, value.device, *layout]}
    # A size is a tuple, too, but not several results.
    if isinstance(value, tuple) and value[:1] != ("size",):
        return {"several": [_value_data(item) for item in value]}
    return value
