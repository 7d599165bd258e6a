"""A certificate may list a call's arguments in any order: the checker takes them by name."""

from dataclasses import replace

import pytest

from bitproof.harness.powers.proofs.prover.certify import certificate_of
from tests.harness.certificate.samples import REJECTED, said_of
from tests.harness.powers.proofs.toy_graphs import compare, randn

W, X = randn(4, 6), randn(4, 6)


def kept(w, x):
    return (w * 2 + x * 0.5,)


def copied(w, x):
    return (w.clone().copy_(x) * 2 + x * 0.5,)


def reversed_arguments(certificate, op):
    def changed(graph):
        calls = (replace(call, args=call.args[::-1]) if call.op == op else call for call in graph.calls)
        return replace(graph, calls=tuple(calls))

    return replace(certificate, reference=changed(certificate.reference), candidate=changed(certificate.candidate))


@pytest.mark.parametrize("op", ["aten.copy_.default", "aten.clone.default"])
def test_the_order_of_a_copys_arguments_does_not_change_its_value(op):
    certificate = certificate_of("example", compare(kept, copied, W, X))
    expected = {"NOT PROVED": 1}
    assert said_of(certificate) == said_of(reversed_arguments(certificate, op)) == expected


def test_a_copy_that_lists_its_target_last_is_not_proved_to_keep_it():
    equal = certificate_of("example", compare(kept, kept, W, X))
    unlike = reversed_arguments(certificate_of("example", compare(kept, copied, W, X)), "aten.copy_.default")
    assert said_of(equal) == {"PROVED": 1}
    assert said_of(replace(unlike, steps=equal.steps, answers=equal.answers)) == REJECTED


def test_a_copy_without_a_source_has_no_value():
    certificate = certificate_of("example", compare(kept, copied, W, X))

    def renamed(call):
        args = tuple(("source" if name == "src" else name, x) for name, x in call.args)
        return replace(call, args=args) if call.op == "aten.copy_.default" else call

    candidate = replace(certificate.candidate, calls=tuple(map(renamed, certificate.candidate.calls)))
    assert said_of(replace(certificate, candidate=candidate)) == REJECTED
