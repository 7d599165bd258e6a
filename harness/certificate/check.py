"""The checker: replays a certificate, and believes nothing but its assumptions and that its graphs are the steps'.

1. Every step of rewriting is checked by its rule, on terms that earlier steps left in their last form.
2. Both graphs are walked call by call: the term that each computes is derived anew, and must have a step.
3. Every answer is held against both walks: PROVED is one term on both sides, which reads a parameter and an input. No
   output may be without an answer.
"""

from __future__ import annotations

from collections import Counter

from harness.certificate.calls import RefusedError, Walk
from harness.certificate.data import Certificate
from harness.certificate.rules import ROOTS, Terms, rejecting, require

SIDES = ("reference", "candidate")
VERDICTS = ("PROVED", "NOT PROVED", "REFUSED")


def check(certificate: Certificate) -> Counter[str]:
    """Count the answers by verdict. Raises RejectedError, saying what is wrong, for a certificate that proves less."""
    with rejecting():
        terms = Terms()
        for step in certificate.steps:
            terms.add(step)
        check_calls(certificate, terms)
    return Counter(answer.verdict for answer in certificate.answers)


def check_calls(certificate: Certificate, terms: Terms) -> None:
    """Walk both graphs, and hold the answers against them."""
    reference, candidate = Walk(terms, certificate.reference, SIDES[0]), Walk(terms, certificate.candidate, SIDES[1])
    for walk in (reference, candidate):
        for call in walk.graph.calls:
            walk.take(call)
    check_answers(certificate, reference, candidate)


def check_answers(certificate: Certificate, reference: Walk, candidate: Walk) -> None:
    """Hold the answers against both graphs, when all calls have their terms."""
    calls, due = [], set()
    for walk in (reference, candidate):
        returned = dict(walk.graph.outputs)
        held = {f"written {name}": index for name, (index, _) in walk.inputs.items()}
        require(len(returned | held) == len(walk.graph.outputs) + len(held), "a name stands for two outputs")
        calls.append(returned | held)
        due |= returned.keys() | {f"written {name}" for name in walk.inputs if walk.is_written(name)}
    require(sorted(answer.output for answer in certificate.answers) == sorted(due), "outputs and answers differ")
    for answer in certificate.answers:
        require(answer.verdict in VERDICTS, f"{answer.verdict} is no verdict")
        if answer.verdict == "PROVED":
            places = _final(reference, calls[0][answer.output]), _final(candidate, calls[1][answer.output])
            require(answer.terms == places and places[0] == places[1], f"{answer.output} is not one term on both sides")
            missing = {*ROOTS} - reference.terms.roots[places[0]]
            require(not missing, f"{answer.output} reads none of the step's: {', '.join(missing)}")


def _final(walk: Walk, index: int) -> int:
    """The term of an output when all has run."""
    try:
        value = walk.readable(index)
    except RefusedError:
        value = None
    require(isinstance(value, int), "what is said to be proved is refused, or no tensor")
    return int(value)
