from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from tests.harness.powers.proofs.toy_graphs import as_data, compare, randn, trace

W, X = randn(4, 6), randn(4, 6)


def test_a_case_is_proved_where_every_output_is_and_refused_where_one_is():
    good, other = (lambda w, x: w * x), (lambda w, x: w - x)
    constant = lambda w, x: w * 2  # noqa: E731
    assert (
        compare(lambda w, x: (good(w, x), other(w, x)), lambda w, x: (good(w, x), other(w, x)), W, X).verdict
        == "PROVED"
    )
    assert (
        compare(lambda w, x: (good(w, x), other(w, x)), lambda w, x: (good(w, x), x - w), W, X).verdict == "NOT PROVED"
    )
    both = lambda w, x: (constant(w, x), x - w)  # noqa: E731
    assert compare(lambda w, x: (constant(w, x), w - x), both, W, X).verdict == "REFUSED"


def test_outputs_pair_by_name_and_one_without_a_partner_is_refused():
    one, two = (as_data(trace(step, (W, X)), (W, X)) for step in (lambda w, x: w * x, lambda w, x: (w * x, w + x)))
    answers = prove_graphs(one, two).answers
    assert [(answer.output, answer.verdict) for answer in answers] == [("out 0", "PROVED"), ("out 1", "REFUSED")]
    assert answers[1].reason == "one of the two graphs has no such output"


def test_graphs_without_outputs_are_refused():
    empty = as_data(trace(lambda w, x: [], (W, X)), (W, X))
    assert prove_graphs(empty, empty).verdict == "REFUSED"
