import pytest
import sympy

from bitproof.harness.powers.proofs.prover.graphs.expressions import size_of


def test_sizes_are_sums_of_products_and_nothing_else():
    a, b = sympy.symbols("u0 u1", integer=True)
    assert size_of(sympy.Integer(7)) == 7
    assert size_of(2 * b * a + b + 3) == ("size", (3,), (2, "u0", "u1"), (1, "u1"))
    assert size_of((a + b) * 2) == size_of(2 * b + 2 * a)
    with pytest.raises(ValueError, match="no sum of products"):
        size_of(sympy.Max(1, a))
