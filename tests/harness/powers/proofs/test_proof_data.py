from bitproof.harness.powers.proofs.prover.proof_data import terms_in


def test_a_term_names_the_terms_that_it_is_made_of_in_order():
    tensor = ("tensor", 3, "float32", "cpu", (("size", (2, 7), (1, 8, 8)), 4), (4, 1), 0)
    found = {
        ("input", "a", "float32", (4, 4)): [],
        ("view", 5, (2, 3), (3, 1), 4): [5],
        ("cat", (5, 6), 1): [5, 6],
        ("exact", "add", "float32", "cpu", (6, 5)): [6, 5],
        ("gather", 5, ((0, 1), (2, 3))): [5],
        ("reduce", 5, "sum in float32", ((0, 1),)): [5],
        ("op", "aten.f", (("x", tensor), ("y", ("list", ("value", 9), 1))), "float32", (4,)): [3, 7, 8, 8, 9],
        ("op", "aten.f", (("x", ("str", "view")), ("n", ("size", (1, 2)))), "float32", (("size", (1, 2)),)): [2, 2],
        ("out", 5, 6, "float32", (7,)): [5],
        ("extent", 5, 6): [5],
        ("rows", (1, ("size", (1, 4)))): [4],
        ("fresh", "candidate", 3, "float32", (4,)): [],
        ("seed",): [],
    }
    assert {term: terms_in(term) for term in found} == found
