"""Converts symbolic sizes of torch's tracer, which are sympy expressions, to tuples."""

from __future__ import annotations

import functools
from typing import Any

import sympy

from bitproof.harness.powers.proofs.prover.proof_data import Size


# A step has few distinct expressions, but torch builds each of them many times.
@functools.lru_cache(maxsize=1 << 16)
def size_of(expression: Any) -> Size:
    """Convert a size to a sum of products of symbols: `2*s0*s1 + 3` becomes `("size", (3,), (2, "s0", "s1"))`.

    Equal sizes become equal tuples. Raises ValueError for any other expression, such as `s0 // 2`.
    """
    expanded = sympy.expand(expression)
    if expanded.is_Integer:
        return int(expanded)
    products = []
    # Add.make_args and Mul.make_args also accept a single product or factor.
    for product in sympy.Add.make_args(expanded):
        coefficient, names = 1, []
        for factor in sympy.Mul.make_args(product):
            base, exponent = factor.as_base_exp()
            if factor.is_Integer:
                coefficient *= int(factor)
            elif base.is_Symbol and exponent.is_Integer and exponent > 0:
                names += [str(base)] * int(exponent)
            else:
                raise ValueError(f"a size that is no sum of products: {expression}")
        products.append((coefficient, *sorted(names)))
    return ("size", *sorted(products, key=lambda product: (product[1:], product[0])))
