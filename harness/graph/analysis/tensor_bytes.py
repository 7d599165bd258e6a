"""Computes the bytes of a value's storage, if its sizes are symbols in the graph.

The case states the size of the chunked dim. If the data determine how an all-to-all or a split divides rows, equal
shares are assumed. Other sizes that depend on data are unknown.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from bitproof.harness.graph import operators, symbols
from bitproof.harness.graph.tracing.trace import ChunkSymbol

MIB = 2**20


class TensorBytes:
    """The bytes of the values of a graph, with numbers for the graph's symbols."""

    def __init__(self, graph: Graph, chunk_symbol: ChunkSymbol) -> None:
        self._symbols: dict[sympy.Basic, sympy.Basic] = {chunk_symbol.symbol: sympy.Integer(chunk_symbol.hint)}
        self._numbers: dict[Any, int | None] = {}
        for node in graph.nodes:
            if operators.operator_name(node) == "all_to_all_single":
                self._balance(node.args[0], *node.args[1:3])
                self._deliver(node)
            elif node.target is torch.ops.aten.split_with_sizes.default:
                # The dim is an optional argument, 0 by default.
                self._balance(node.args[0], node.args[1], dim=(*node.args[2:], 0)[0])

    def of(self, value: torch.Tensor) -> int | None:
        """Return the number of bytes that a tensor spans in memory, from its first to its last element.

        Return None if a size or stride depends on data in a way that cannot be estimated.
        """
        sizes, strides = [self._number(n) for n in value.shape], [self._number(n) for n in value.stride()]
        # One more than the distance from the first to the last element.
        extent = 1
        for size, stride in zip(sizes, strides, strict=True):
            if size is None or stride is None:
                return None
            extent += (size - 1) * stride
        return extent * value.element_size() if 0 not in sizes else 0

    def _balance(self, rows: Any, *splits: Any, dim: Any = 0) -> None:
        num_rows = self._number(rows.meta["val"].shape[dim])
        for sizes in splits:
            for size in sizes:
                # Only a symbol needs a number of its own: an expression follows from the symbols in it.
                symbol = symbols.expression(size.meta["val"]) if isinstance(size, Node) else None
                if isinstance(symbol, sympy.Symbol) and symbol not in self._symbols and num_rows is not None:
                    self._symbols[symbol] = sympy.Rational(num_rows, len(sizes))

    def _deliver(self, exchange: Node) -> None:
        # With balanced routing, an all-to-all receives as many rows as it sends.
        expression = symbols.expression(exchange.meta["val"].shape[0])
        num_rows = self._number(exchange.args[0].meta["val"].shape[0])  # type: ignore[union-attr]
        if num_rows is not None and (rest := symbols.remainder(expression, self._symbols, num_rows)):
            self._symbols |= rest

    def _number(self, size: Any) -> int | None:
        expression = symbols.expression(size)
        if isinstance(expression, int):
            return expression
        # None is not final: a later call may give a number to a symbol in the expression.
        if self._numbers.get(expression) is None:
            # Substitute only the symbols in it: sympy sorts all given ones every time.
            known = {symbol: self._symbols[symbol] for symbol in expression.free_symbols if symbol in self._symbols}
            is_known = len(known) == len(expression.free_symbols)
            self._numbers[expression] = int(expression.subs(known)) if is_known else None
        return self._numbers[expression]
