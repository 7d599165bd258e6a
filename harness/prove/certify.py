"""A proof as a certificate."""

from __future__ import annotations

import platform
from dataclasses import replace

from harness.certificate.check import needed
from harness.certificate.data import Answer, Certificate, Step, moved_term
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
        steps=tuple(proof.table.steps),
        answers=tuple(Answer(answer.output, answer.verdict, answer.terms) for answer in proof.answers),
        refused=(tuple(sorted(reference.refused)), tuple(sorted(candidate.refused))),
        assumptions=tuple(assumptions_of(proof.table, graphs)),
        environment=(("torch", torch_version() or "unknown"), ("machine", platform.machine())),
    )
    smaller = _pruned(whole)
    while len(smaller.steps) < len(whole.steps):
        whole, smaller = smaller, _pruned(smaller)
    return smaller


def _pruned(certificate: Certificate) -> Certificate:
    """Without what the search put down and did not need, such as joins that failed halfway. Asks the checker."""
    kept = sorted(needed(certificate))
    places = {old: new for new, old in enumerate(kept)}
    steps = [certificate.steps[old] for old in kept]
    return replace(
        certificate,
        steps=tuple(Step(moved_term(step.term, places), step.rule, places[step.equals]) for step in steps),
        answers=tuple(
            replace(x, terms=(places[x.terms[0]], places[x.terms[1]]) if x.verdict == PROVED else (-1, -1))
            for x in certificate.answers
        ),
    )
