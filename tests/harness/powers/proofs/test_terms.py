from bitproof.harness.powers.proofs.prover.rules import RULES
from bitproof.harness.powers.proofs.prover.terms import Table
from bitproof.harness.powers.proofs.prover.windows import whole


def test_equal_terms_stand_in_one_place_and_others_in_another():
    table = Table({})
    a = table.make(("input", "a", "float32", (2, 3)))
    assert table.make(("input", "a", "float32", (2, 3))) == a
    assert table.make(("input", "a", "float64", (2, 3))) != a
    assert table.make(("input", "b", "float32", (2, 3))) != a


def test_a_rewritten_term_is_kept_with_its_rule_and_leads_to_its_last_form():
    table = Table(RULES)
    a = table.make(("input", "a", "float32", (2, 3)))
    assert table.view(a, whole((2, 3))) == a
    assert [(step.rule, step.equals) for step in table.steps] == [("", a), ("view_of_whole", a)]
    assert table.used() == {"view_of_whole"}


def test_steps_rest_on_earlier_ones():
    table = Table(RULES)
    a, b = (table.make(("input", name, "float32", (4, 3))) for name in "ab")
    added = table.make(("exact", "add", "float32", "cpu", (b, a)))
    table.view(table.make(("cat", (added, a), 0)), whole((2, 4, 3)))
    for place, step in enumerate(table.steps):
        assert step.equals <= place
        assert all(below < place for below in table.reachable([place]) - {place})


def test_shapes_of_terms():
    table = Table({})
    a = table.make(("input", "a", "float32", (4, 3)))
    shapes = {
        ("cat", (a, a), 1): (4, 6),
        ("gather", a, ((0, 1),)): (2, 4, 3),
        ("reduce", a, "sum", ((0, 1, 2, 3),)): (3,),
        ("exact", "neg", "float32", "cpu", (a,)): (4, 3),
        ("op", "aten.f", (), "float32", (("size", (1, 0)), 3)): None,
    }
    assert {term: table.open_shape(table.make(term)) for term in shapes} == shapes
