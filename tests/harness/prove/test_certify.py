from harness.certificate.check import check, needed
from harness.prove.certify import certificate_of
from tests.harness.prove.graphs import compare, randn

W, X = randn(4, 6), randn(4, 6)


def test_a_certificate_holds_no_step_that_nobody_needs():
    halves = lambda w, x: (w[:2] * x[:2] + x[:2], w[2:] * x[2:] + w[2:])  # noqa: E731
    whole = lambda w, x: ((w * x + x)[:2], (w * x + w)[2:])  # noqa: E731
    proof = compare(halves, whole, W, X)
    found = certificate_of("halves", proof)
    assert check(found) == {"PROVED": 2}
    assert needed(found) == set(range(len(found.steps)))
    assert found.environment[0][0] == "torch"
    assert all(type(text) is str for pair in found.environment for text in pair)
