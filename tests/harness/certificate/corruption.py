"""Certificates with one thing changed: what a checker must reject.

A change is made where it means something: in steps and answers anywhere; in graphs in operators, arguments, shapes,
dtypes, groups and outputs. What only readers see, and layouts that nothing opaque reads, is left alone.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from bitproof.harness.powers.proofs.prover.proof_data import Call, Certificate, Graph, ProofStep, Tensor, terms_in


def corrupt(certificate: Certificate, chance: random.Random) -> tuple[str, Certificate]:
    """A certificate that differs in one place, and words for where."""
    while True:
        kind = chance.choice(list(_KINDS))
        found = _KINDS[kind](certificate, chance)
        if found is not None and found != certificate:
            return kind, found


def _changed(value: Any, chance: random.Random) -> Any:
    """A value with one leaf changed."""
    match value:
        case int():
            return 0 if value > 1 << 40 else value + chance.choice([-1, 1, 2, 64])  # an end beyond any is any end
        case str():  # the kind of a size or of an argument, too
            return value + "_" if value else "view_of_whole"
        case tuple() if value:
            place = chance.randrange(len(value))
            return (*value[:place], _changed(value[place], chance), *value[place + 1 :])
        case tuple():
            return (1,)
        case None:
            return 1
    raise AssertionError(value)


def _in_steps(change: Any) -> Any:
    def corrupted(certificate: Certificate, chance: random.Random) -> Certificate | None:
        steps = certificate.steps
        place = chance.randrange(len(steps))
        changed = change(steps[place], chance)
        return None if changed is None else replace(certificate, steps=(*steps[:place], *changed, *steps[place + 1 :]))

    return corrupted


def _early_step(certificate: Certificate, chance: random.Random) -> Certificate | None:
    """A step before one that it rests on."""
    steps = certificate.steps
    place = chance.randrange(len(steps))
    below = terms_in(steps[place].term)
    if not below:
        return None
    target = chance.choice(below)
    moved = (*steps[:target], steps[place], *steps[target:place], *steps[place + 1 :])
    return replace(certificate, steps=moved)


def _hint(certificate: Certificate, chance: random.Random) -> Certificate | None:
    """What a rule's arithmetic found, changed; steps with a hint are few."""
    steps = certificate.steps
    for _ in range(2000):
        place = chance.randrange(len(steps))
        if steps[place].hint:
            changed = replace(steps[place], hint=_changed(steps[place].hint, chance))
            return replace(certificate, steps=(*steps[:place], changed, *steps[place + 1 :]))
    return None


def _layout(call: Call, chance: random.Random) -> Call | None:
    """Where a view's result lies, for its layout is all that says what it shows."""
    if call.op != "view" or not isinstance(call.value, Tensor):
        return None
    dims = [dim for dim, size in enumerate(call.value.shape) if size > 1]
    if not dims or chance.random() < 0.5:
        return replace(call, value=replace(call.value, offset=_changed(call.value.offset, chance)))
    dim, strides = chance.choice(dims), list(call.value.strides)
    strides[dim] = _changed(strides[dim], chance)
    return replace(call, value=replace(call.value, strides=tuple(strides)))


def _in_graph(change: Any) -> Any:
    def corrupted(certificate: Certificate, chance: random.Random) -> Certificate | None:
        side = chance.choice(["reference", "candidate"])
        graph: Graph = getattr(certificate, side)
        place = chance.randrange(len(graph.calls))
        call = change(graph.calls[place], chance)
        if call is None:
            return None
        return replace(
            certificate, **{side: replace(graph, calls=(*graph.calls[:place], call, *graph.calls[place + 1 :]))}
        )

    return corrupted


def _operator(call: Call, chance: random.Random) -> Call | None:
    return replace(call, op=chance.choice([call.op + "_", "aten.sub.Tensor", "aten.exp.default"]))


def _arguments(call: Call, chance: random.Random) -> Call | None:
    places = [place for place, (_, value) in enumerate(call.args) if not _refers(value)]
    if not places:
        return None
    place = chance.choice(places)
    return replace(call, args=(*call.args[:place], _changed(call.args[place], chance), *call.args[place + 1 :]))


def _refers(value: Any) -> bool:
    return isinstance(value, tuple) and (value[:1] == ("node",) or any(map(_refers, value)))


def _operand(certificate: Certificate, chance: random.Random) -> Certificate | None:
    """One call reads another, of another shape: those of one shape may hold one value."""
    graph = certificate.candidate
    place = chance.randrange(len(graph.calls))
    call = graph.calls[place]
    reads = (
        [k for k, (_, value) in enumerate(call.args) if isinstance(value, tuple) and value[:1] == ("node",)]
        if place
        else []
    )
    if not reads or not isinstance(call.value, Tensor):
        return None
    where, other = chance.choice(reads), chance.randrange(place)
    was = graph.calls[call.args[where][1][1]].value
    if not isinstance(was, Tensor) or getattr(graph.calls[other].value, "shape", None) == was.shape:
        return None
    args = (*call.args[:where], (call.args[where][0], ("node", other)), *call.args[where + 1 :])
    calls = (*graph.calls[:place], replace(call, args=args), *graph.calls[place + 1 :])
    return replace(certificate, candidate=replace(graph, calls=calls))


def _result(call: Call, chance: random.Random) -> Call | None:
    if not isinstance(call.value, Tensor) or not call.value.shape:
        return None
    name = chance.choice(["dtype", "shape"])
    return replace(call, value=replace(call.value, **{name: _changed(getattr(call.value, name), chance)}))


def _group(call: Call, chance: random.Random) -> Call | None:
    """A collective's ranks in another order, or one of them another."""
    args = dict(call.args)
    if "group_name" not in args:
        return None
    ranks = args["group_name"][1]
    other = tuple(row[::-1] for row in ranks) if chance.random() < 0.5 else _changed(ranks, chance)
    return replace(call, args=tuple((args | {"group_name": ("ranks", other)}).items()))


def _output(certificate: Certificate, chance: random.Random) -> Certificate | None:
    graph = certificate.candidate
    outputs = list(graph.outputs)
    place = chance.randrange(len(outputs))
    outputs[place] = (outputs[place][0], chance.randrange(len(graph.calls)))
    return replace(certificate, candidate=replace(graph, outputs=tuple(outputs)))


def _dropped_call(certificate: Certificate, chance: random.Random) -> Certificate | None:
    graph = certificate.reference
    place = chance.randrange(len(graph.calls))
    return replace(certificate, reference=replace(graph, calls=graph.calls[:place] + graph.calls[place + 1 :]))


def _answer(certificate: Certificate, chance: random.Random) -> Certificate | None:
    place = chance.randrange(len(certificate.answers))
    output, verdict = certificate.answers[place]
    other = chance.choice(["PROVED", "NOT PROVED", "REFUSED", "MAYBE"])
    answer = chance.choice([(output + "_", verdict), (output, other)])
    return replace(certificate, answers=(*certificate.answers[:place], answer, *certificate.answers[place + 1 :]))


def _dropped_answer(certificate: Certificate, chance: random.Random) -> Certificate | None:
    place = chance.randrange(len(certificate.answers))
    return replace(certificate, answers=certificate.answers[:place] + certificate.answers[place + 1 :])


_KINDS = {
    "a term": _in_steps(lambda step, chance: [replace(step, term=_changed(step.term, chance))]),
    "a rule": _in_steps(
        lambda step, chance: [replace(step, rule=chance.choice(["", "cat_of_cat", "exact_in_order", "x"]))]
    ),
    "what a term equals": _in_steps(lambda step, chance: [replace(step, equals=_changed(step.equals, chance))]),
    "a hint": _hint,
    "a step left out": _in_steps(lambda step, chance: []),
    "a step twice": _in_steps(lambda step, chance: [step, step]),
    "a step of one's own": _in_steps(lambda step, chance: [ProofStep(("input", "x", "float32", (1,)), "", 0), step]),
    "a step before one that it rests on": _early_step,
    "an operator": _in_graph(_operator),
    "an argument": _in_graph(_arguments),
    "an operand": _operand,
    "a result": _in_graph(_result),
    "a view's layout": _in_graph(_layout),
    "a call left out": _dropped_call,
    "a group's ranks": _in_graph(_group),
    "an output": _output,
    "an answer": _answer,
    "an answer left out": _dropped_answer,
}
