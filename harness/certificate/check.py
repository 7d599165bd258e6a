"""The checker: replays a certificate, and trusts only its assumptions and that its graphs are the steps'.

1. Every step of rewriting is checked by its rule, on terms that earlier steps left in their last form.
2. Both graphs are walked call by call: the term that each call computes is derived again, and must have a step.
3. Every output gets its answer: PROVED is one term on both sides, which reads a parameter and an input, unless it is
   state that a whole step leaves. No other answer may be claimed of it, and no output may be without one.
4. The certificate must state all assumptions of a proof by these rules about these graphs.
"""

from __future__ import annotations

from collections import Counter

from bitproof.harness.certificate.assumptions import assumed
from bitproof.harness.certificate.calls import Walk
from bitproof.harness.certificate.data import ROOTS, WRITTEN, Certificate
from bitproof.harness.certificate.errors import rejecting, require
from bitproof.harness.certificate.rules import Terms
from bitproof.harness.certificate.types import SIDES


def check(certificate: Certificate) -> Counter[str]:
    """Count the answers by verdict. Raises RejectedError, which says what is wrong, for a certificate that proves
    less."""
    with rejecting():
        terms = Terms()
        for step in certificate.steps:
            terms.add(step)
        check_calls(certificate, terms)
        rests = assumed((certificate.reference, certificate.candidate), {step.rule for step in certificate.steps})
        require({*rests} <= {*certificate.assumptions}, f"it does not list the assumption {rests}")
    return Counter(verdict for _, verdict in certificate.answers)


def check_calls(certificate: Certificate, terms: Terms) -> None:
    """Walk both graphs, and compare the answers with them."""
    reference, candidate = Walk(terms, certificate.reference, SIDES[0]), Walk(terms, certificate.candidate, SIDES[1])
    for walk in (reference, candidate):
        for call in walk.graph.calls:
            walk.take(call)
    check_answers(certificate, reference, candidate)


def check_answers(certificate: Certificate, reference: Walk, candidate: Walk) -> None:
    """Compare the answers with both graphs, after all calls have their terms."""
    ones, others, found = reference.outputs(), candidate.outputs(), {}
    is_whole = reference.graph.is_whole_step
    for name in ones | others:
        (one, was_one), (other, was_other) = ones.get(name, (None, None)), others.get(name, (None, None))
        if (one, other) != (was_one, was_other):
            found[name] = _answer(reference.terms, one, other, is_whole and name.startswith(WRITTEN))
    told = ", ".join(f"{name} is {answer}" for name, answer in {*found.items()} - {*certificate.answers})
    require(sorted(certificate.answers) == sorted(found.items()), f"outputs and answers differ: {told}")


def _answer(terms: Terms, one: object, other: object, is_state: bool) -> str:
    """The verdict that follows for an output with these terms. State may be set to what depends on no input."""
    if not isinstance(one, int) or not isinstance(other, int):
        return "REFUSED"
    if one != other:
        return "NOT PROVED"
    return "PROVED" if is_state or terms.roots[one] == {*ROOTS} else "REFUSED"
