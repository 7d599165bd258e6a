"""Turns sizes from torch's tracer, which are sympy expressions, into data."""

from __future__ import annotations

import functools
from typing import Any

import sympy

from bitproof.harness.powers.proofs.prover.proof_data import Size


@functools.lru_cache(maxsize=1 << 16)
def size_of(expression: Any) -> Size:
    """A size as a sum of products of symbols, in canonical order. Raises ValueError if it is no such sum.

    A whole step has few distinct expressions, but torch builds each of them many times, so results are cached.
    """
    expanded = sympy.expand(expression)
    if expanded.is_Integer:
        return int(expanded)
    products = []
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
