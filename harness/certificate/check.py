"""The checker: replays a certificate, and believes nothing but its assumptions and that its graphs are the steps'.

1. Every step of rewriting is checked by its rule, on terms that earlier steps left in their last form.
2. Every call of both graphs is walked anew; the term that it computes must have a step.
3. Every answer is held against both walks: PROVED is one term on both sides, which reads a parameter and an input. No
   output may be without an answer, and no step without a reader.
"""

from __future__ import annotations

from collections import Counter

from harness.certificate.calls import RejectedError, Walk, require
from harness.certificate.data import Certificate, Graph, Step, reads_of, terms_in
from harness.certificate.rules import RULES, Terms

VERDICTS = ("PROVED", "NOT PROVED", "REFUSED")
KINDS = ("parameter ", "input ")


def check(certificate: Certificate) -> Counter[str]:
    """Count the answers by verdict. Raises RejectedError, saying what is wrong, for a certificate that proves less."""
    unread = set(range(len(certificate.steps))) - needed(certificate)
    require(not unread, f"nothing needs step {min(unread, default=None)}")
    return Counter(answer.verdict for answer in certificate.answers)


def needed(certificate: Certificate) -> set[int]:
    """Check all but that every step is needed, and return those that are: what was looked up, and all below."""
    try:
        terms = Terms()
        for step in certificate.steps:
            _check_step(terms, step)
        graphs = {"reference": certificate.reference, "candidate": certificate.candidate}
        walks = {
            side: Walk(terms, graph, side, frozenset(refused))
            for (side, graph), refused in zip(graphs.items(), certificate.refused, strict=True)
        }
        _check_answers(certificate, terms, walks["reference"], walks["candidate"])
    except RejectedError:
        raise
    except KeyError as error:
        raise RejectedError(f"no step has {error}") from error
    except (AttributeError, IndexError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise RejectedError(f"{type(error).__name__}: {error}") from error
    found, stack = set(), list(terms.used)
    while stack:
        top = stack.pop()
        if top not in found:
            found.add(top)
            stack += terms_in(terms.terms[top])
    return found


def _check_step(terms: Terms, step: Step) -> None:
    place = len(terms.terms)
    require(step.term not in terms.places, f"step {place} has a term that has one already")
    for below in terms_in(step.term):
        require(0 <= below < place, f"step {place} reads term {below}, which has no step yet")
        require(terms.equals[below] == below, f"step {place} reads term {below}, which was rewritten")
    if step.rule:
        kind, rule = RULES[step.rule]
        require(step.term[0] == kind, f"step {place} applies {step.rule} to a term of kind {step.term[0]}")
        require(rule(terms, step.term) == step.equals, f"step {place} does not follow by {step.rule}")
    else:
        require(step.equals == place, f"step {place} says that its term is another, and by no rule")
    terms.terms.append(step.term)
    terms.equals.append(step.equals)
    terms.places[step.term] = place


def _outputs(walk: Walk, graph: Graph) -> dict[str, int]:
    """The calls that give each output; an input that was written is one."""
    found = dict(graph.outputs)
    require(len(found) == len(graph.outputs), "a graph returns two outputs of one name")
    for index, call in enumerate(graph.calls):
        if call.op == "input":
            start = walk.terms.places[("input", call.name, call.value.dtype, call.value.shape)]
            if index in walk.stale or walk.values[index] != start:
                found[f"written {call.name}"] = index
    return found


def _check_answers(certificate: Certificate, terms: Terms, reference: Walk, candidate: Walk) -> None:
    inputs = {call.name: index for index, call in enumerate(candidate.graph.calls) if call.op == "input"}
    outputs = _outputs(reference, certificate.reference), _outputs(candidate, certificate.candidate)
    reads = reads_of(terms.terms, KINDS)
    answered = [answer.output for answer in certificate.answers]
    require(sorted(answered) == sorted(outputs[0].keys() | outputs[1].keys()), "outputs and answers are not the same")
    for answer in certificate.answers:
        require(answer.verdict in VERDICTS, f"{answer.verdict} is no verdict")
        if answer.verdict != "PROVED":
            continue
        places = [
            _final(walk, found.get(answer.output, inputs.get(answer.output.removeprefix("written "))), answer.output)
            for walk, found in zip((reference, candidate), outputs, strict=True)
        ]
        require(places[0] == places[1], f"the sides of {answer.output} are two terms")
        require(answer.terms == (places[0], places[1]), f"{answer.output} is said to be another term")
        for bit, kind in enumerate(KINDS):
            require(reads[places[0]] >> bit & 1 == 1, f"{answer.output} reads no {kind}of the step")


def _final(walk: Walk, index: int | None, output: str) -> int:
    require(index is not None and index not in walk.flying, f"{output} is no output that is there in the end")
    assert index is not None
    require(walk.values[index] is not None and index not in walk.stale, f"{output} is refused, and said to be proved")
    require(isinstance(walk.values[index], int), f"{output} is several tensors")
    return int(walk.values[index])
