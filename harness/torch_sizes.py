"""Caches arithmetic on symbolic sizes, and makes divisions in sizes exact.

torch uses sympy to multiply a symbolic size by a number, or to compare two sizes. It does so a dozen times for each
tensor, nearly always for the same operands.

torch's result depends on the operands' expressions, types, hints and forms, and on the symbols that the ShapeEnv has
replaced, whose state has a version number. A cache key consists of all these. Each result is a new node, as in torch: a
tracer identifies nodes by identity, so it records the same graph as without the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import sympy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv

_KEPT = "bitproof_results"
"""The name of the attribute in which a ShapeEnv keeps its results, by key."""

_OPERATORS = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")


def remember_arithmetic(shape_env: ShapeEnv) -> None:
    """From now on, cache the sums, differences, products and comparisons of sizes of this ShapeEnv.

    Other ShapeEnvs are unaffected.
    """
    setattr(shape_env, _KEPT, {})
    # The class is patched once for the whole process; a ShapeEnv without a cache is computed as before.
    if hasattr(SymNode.maybe_as_int, _KEPT):
        return
    for operator in _OPERATORS:
        setattr(SymNode, f"_{operator}", _caching(operator, getattr(SymNode, f"_{operator}")))
    SymNode.maybe_as_int = _caching_number(SymNode.maybe_as_int)  # type: ignore[method-assign, assignment]


def _caching(operator: str, own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(own)
    def computed(one: Any, other: Any) -> Any:
        kept: dict[Hashable, dict[str, Any]] | None = getattr(one.shape_env, _KEPT, None)
        # While a tracer records, torch's own function notes the operator, and then calls this one without the tracer.
        if kept is None or type(other) is not SymNode or get_proxy_mode() is not None:
            return own(one, other)
        key = operator, _node_key(one), _node_key(other), _version(one.shape_env)
        if key not in kept:
            result = own(one, other)
            if type(result) is SymNode and not result.fx_node:  # it has an fx node if torch validates its own guards
                kept[key] = dict(vars(result))
            return result
        # A new node each time, as a tracer identifies nodes by identity.
        result = SymNode.__new__(SymNode)
        vars(result).update(kept[key])
        return result

    return computed


def _caching_number(own: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    @functools.wraps(own)
    def computed(node: Any) -> int | None:
        kept: dict[Hashable, Any] | None = getattr(node.shape_env, _KEPT, None)
        if kept is None:
            return own(node)
        key = node._expr, _version(node.shape_env)
        if key not in kept:
            kept[key] = own(node)
        found: int | None = kept[key]
        return found

    setattr(computed, _KEPT, True)
    return computed


def _node_key(node: Any) -> Hashable:
    """Return the properties of a node on which the results of its arithmetic depend."""
    return node._expr, node.pytype, node._hint, getattr(node, "_optimized_summation", None)


def _version(shape_env: Any) -> Hashable:
    """Return a value that changes whenever torch replaces a symbol, and in torch 2.11 also whenever it adds a fact."""
    return getattr(shape_env, "_replacements_version_counter", shape_env._version_counter)


def exact(size: Any) -> Any:
    """Return a size in which each integer division is an exact division: `(n // 2) * 3` becomes `n / 2 * 3`."""
    if not isinstance(size, sympy.Basic):
        return size
    return size.replace(lambda part: isinstance(part, FloorDiv), lambda part: part.args[0] / part.args[1])
