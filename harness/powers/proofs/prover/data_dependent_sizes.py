"""Replaces a data-dependent size, such as `u0`, by the term that defines its number.

Two graphs may use different symbols for the same number, or the same symbol for different numbers. A symbol is defined
by one of these:

- a number that is read from a tensor, as by `x.item()`;
- a size of a call's result;
- the number of rows that an all-to-all receives.
"""

from __future__ import annotations

from typing import Any

from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, refuse
from bitproof.harness.powers.proofs.prover.proof_data import Call, Size, Tensor
from bitproof.harness.powers.proofs.prover.terms import Table


class Symbols:
    """Maps each symbol of a graph, such as `u0`, to the term that defines it.

    The methods `name_...` define a symbol. They are called with the first call whose result contains it.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._terms: dict[str, int] = {}

    def size(self, size: Size) -> Size:
        """Return `size` after replacing each symbol by the index of the term that defines it.

        Raises RefusedError for a symbol without such a term.
        """
        if isinstance(size, int):
            return size
        if unknown := [name for product in size[1:] for name in product[1:] if name not in self._terms]:
            raise RefusedError(f"a size of a symbol that is not understood: {unknown[0]}", where="a call's arguments")
        # Sorted again, since terms are in another order than the symbols' names.
        products = [(product[0], *sorted(self._terms[name] for name in product[1:])) for product in size[1:]]
        return ("size", *sorted(products, key=lambda product: (product[1:], product[0])))

    def sizes(self, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        return tuple(self.size(size) for size in sizes)

    def unknown(self, value: Any) -> list[str]:
        return [name for name in dict.fromkeys(symbols_in(value)) if name not in self._terms]

    def name_item(self, call: Call, term: int) -> None:
        for symbol in self.unknown(call.value):
            # The number is a symbol alone, such as `u0` for `x.item()`.
            if call.value != ("size", (1, symbol)):
                raise refuse(call, "a number that is not understood")
            self._terms[symbol] = term

    def name_extents(self, call: Call, term: int, shape: tuple[Size, ...]) -> None:
        """Define each symbol that first occurs in the sizes of this call's results as "the i-th size of `term`".

        `shape` has these sizes, result after result. Raises RefusedError if a symbol is only a part of a size, as in
        `2 * u0`.
        """
        for name in self.unknown(call.value):
            if ("size", (1, name)) not in shape:
                raise refuse(call, f"a size that depends on data in a way that is not understood: {name}")
            self._terms[name] = self.table.make(("extent", term, shape.index(("size", (1, name)))))

    def name_rows(self, call: Call) -> None:
        """Define the symbol that occurs in the number of rows that an all-to-all receives.

        The number of received rows is the sum of the output splits. It is traced as the first split plus a symbol, so
        the symbol is the sum of the other splits.
        """
        first, *others = dict(call.args)["output_split_sizes"][1:]
        for name in self.unknown(call.value):
            if call.value.shape[0] != _sum_of(first, name):
                raise refuse(call, f"a number of rows that is not understood: {call.value.shape[0]}")
            self._terms[name] = self.table.make(("rows", self.sizes(tuple(others))))


def symbols_in(value: Any) -> list[str]:
    """Return the symbols in a call's result or arguments, in order, with repetitions.

    For example, ["u0", "u1"] for the size `2 * u0 + u1`.
    """
    match value:
        case Tensor():
            return [s for size in (*value.shape, *value.strides, value.offset) for s in symbols_in(size)]
        case ("size", *products):
            return [symbol for _, *symbols in products for symbol in symbols]
        case tuple():
            return [symbol for item in value for symbol in symbols_in(item)]
    return []


def _sum_of(size: Size, symbol: str) -> Size:
    # Sorted as `expressions.size_of` sorts, so that equal sizes are equal tuples.
    # A number is a product without symbols, and 0 is a sum of no products.
    products = size[1:] if isinstance(size, tuple) else ((size,),) if size else ()
    return ("size", *sorted((*products, (1, symbol)), key=lambda product: (product[1:], product[0])))
