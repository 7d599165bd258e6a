"""Caches arithmetic on symbolic sizes.

torch multiplies and compares symbolic sizes with sympy, a dozen times per tensor, and mostly with equal operands. The
cache key has everything on which torch's result depends: the operands, and the version of the ShapeEnv. Each result is
a new node, because tracers distinguish nodes by identity.
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
"""Name of the attribute of a ShapeEnv that holds its cache, as key -> result."""

_OPERATORS = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")


def remember_arithmetic(shape_env: ShapeEnv) -> None:
    """Cache the arithmetic and comparisons on sizes of this ShapeEnv from now on."""
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
    # The properties on which a result depends.
    return node._expr, node.pytype, node._hint, getattr(node, "_optimized_summation", None)


def _version(shape_env: Any) -> Hashable:
    # In torch 2.11 the counter also changes when torch learns a fact, and later only when it replaces a symbol.
    return getattr(shape_env, "_replacements_version_counter", shape_env._version_counter)


def exact(size: Any) -> Any:
    """Replace each integer division in a size by an exact division: `(n // 2) * 3` becomes `n / 2 * 3`."""
    if not isinstance(size, sympy.Basic):
        return size
    return size.replace(lambda part: isinstance(part, FloorDiv), lambda part: part.args[0] / part.args[1])
