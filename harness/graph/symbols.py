"""Questions about symbolic sizes: whether a value depends on the chunk symbol, in which dim, and its number."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.errors import ChunkError
from bitproof.harness.torch_compat import has_open_sizes

SYMBOLIC_SCALARS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float, bool, *SYMBOLIC_SCALARS))


def expression(size: Any) -> sympy.Basic | int:
    """Return the sympy expression of a symbolic scalar. Any other value, such as an int, is returned unchanged."""
    return size.node.expr if isinstance(size, SYMBOLIC_SCALARS) else size


def free_symbols(value: Any) -> set[sympy.Symbol]:
    """Return the symbols in a scalar, in a tensor's sizes and strides, or in the items of a tuple or list."""
    if isinstance(value, SYMBOLIC_SCALARS):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        if not has_open_sizes(value):
            # Called for every value after every pass, and nearly all are concrete.
            return set()
        return set().union(*(free_symbols(size) for size in (*value.shape, *_strides(value))))
    if isinstance(value, (tuple, list)):
        return set().union(*(free_symbols(item) for item in value))
    return set()


def _strides(value: torch.Tensor) -> tuple[Any, ...]:
    return value.stride() if value.layout == torch.strided else ()


def carries(value: Any, symbol: sympy.Symbol) -> bool:
    """Return whether a tensor's size, or a scalar, depends on `symbol`."""
    if isinstance(value, torch.Tensor):
        return any(symbol in free_symbols(size) for size in value.shape)
    return symbol in free_symbols(value)


def chunk_dim(value: torch.Tensor, symbol: sympy.Symbol) -> int | None:
    """Return the dim whose size is `symbol`. Return None if there is none, or if several dims depend on `symbol`.

    A size such as 4 * `symbol` does not count.
    """
    # Such a dim has flattened rows: splitting or joining it would scramble them.
    carrying = [dim for dim, size in enumerate(value.shape) if symbol in free_symbols(size)]
    if len(carrying) == 1 and expression(value.shape[carrying[0]]) == symbol:
        return carrying[0]
    return None


def is_scalar_of(value: Any, symbol: sympy.Symbol) -> bool:
    """Return whether a value is a symbolic scalar with `symbol` as its only symbol."""
    return isinstance(value, SYMBOLIC_SCALARS) and free_symbols(value) == {symbol}


def number(value: Any, symbol: sympy.Symbol, extent: int) -> int | float | bool:
    """Return the number of a symbolic scalar for `symbol` = `extent`. For example, 2 * n with extent 4 is 8."""
    result = _substituted(value.node.expr, symbol, extent)
    if isinstance(value, torch.SymBool):
        return bool(result)
    return float(result) if isinstance(value, torch.SymFloat) else int(result)


def number_of(node: Node, symbol: sympy.Symbol, extent: int) -> int | float | bool:
    """Return the value of a node that computes a scalar, for `symbol` = `extent`.

    A float is computed by Python, operation by operation, so that it is rounded as in eager mode.
    """
    value = node.meta["val"]
    if isinstance(value, torch.SymInt) or (isinstance(value, SYMBOLIC_SCALARS) and node.op == "placeholder"):
        return number(value, symbol, extent)
    if not isinstance(value, SYMBOLIC_SCALARS):
        return value
    # No integer: the node's calls run again. Sympy would reorder operations on floats, as in (n * 0.1) * 0.7 = n *
    # 0.07.
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: number_of(x, symbol, extent))
    return node.target(*args, **kwargs)  # type: ignore[operator]


@functools.lru_cache(maxsize=4096)
def _substituted(expr: sympy.Basic, symbol: sympy.Symbol, extent: int) -> sympy.Basic:
    return expr.subs(symbol, extent)


def remainder(size: Any, known: Mapping[Any, Any], total: Any) -> dict[sympy.Symbol, Any]:
    """Solve `size` = `total` for the only unknown symbol in the sum `size`, and return {symbol: number}.

    `known` maps the other symbols to their numbers. For example, u0 + 4 = 10 returns {u0: 6}. Returns {} unless exactly
    one symbol is unknown.
    """
    unknown = [symbol for symbol in getattr(size, "free_symbols", ()) if symbol not in known]
    if len(unknown) != 1:
        return {}
    others = {symbol: known[symbol] for symbol in size.free_symbols if symbol in known}
    return {unknown[0]: total - size.subs(others | {unknown[0]: 0})}


def require_chunk_dim(node: Node, value: torch.Tensor, symbol: sympy.Symbol, action: str) -> int:
    """Return the dim of a node's value whose size is `symbol`, as `chunk_dim` does. Raises ChunkError if there is none.

    `action` is a verb for the error, such as "split".
    """
    dim = chunk_dim(value, symbol)
    if dim is None:
        raise ChunkError(
            f"cannot {action} `{node.name}`: no single dim of it is the chunked dim",
            expected=f"exactly one dim of size {symbol}",
            found=f"shape {list(map(str, value.shape))}",
            where=source_of(node),
            fix="keep batch and sequence as dims of their own at the border of a chunked module",
        )
    return dim


def source_of(node: Node) -> str:
    """Return a node's module, direction and source line as text, for the `where` of an error."""
    from bitproof.harness.graph.origin import origin_of

    origin = origin_of(node)
    return f"{origin}, {origin.source}" if origin.source else str(origin)


def symbols_in(nodes: Iterable[Node]) -> set[sympy.Symbol]:
    return set().union(*(free_symbols(node.meta.get("val")) for node in nodes))


def graph_carries(module: GraphModule, symbol: sympy.Symbol) -> bool:
    """Return whether a value in a graph, or in a graph nested in it, depends on `symbol`."""
    return any(
        symbol in symbols_in(nested.graph.nodes) for nested in module.modules() if isinstance(nested, GraphModule)
    )
