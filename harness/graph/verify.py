"""What must hold of the graph between any two passes.

1. Nodes stand in topological order, and are of the kinds that passes know.
2. Every call has a `val` and an origin.
3. No argument is a symbolic number: when the graph runs, only nodes have values.
4. Every symbol in a value comes from a graph input, or from an earlier operator that may make one: one that
   reads data, or an uneven all-to-all (see fake_mode.py).
5. A symbol that has been resolved is carried by no value.

Rules 3 to 5 hold for graph modules nested in the graph too. Each rule reads every node once, and a value
that many nodes share is looked at once: what verification costs grows with the graph, not faster.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx import Graph, GraphModule, Node

from harness.errors import PassError
from harness.graph import operators, symbols
from harness.graph.origin import META_KEY

_NONE: set[sympy.Symbol] = set()
_KINDS = ("placeholder", "get_attr", "call_function", "output")


def verify(module: GraphModule, resolved: sympy.Symbol | None = None) -> None:
    """Raise PassError, naming the node, unless the rules hold. `resolved` is a symbol that is a number by now."""
    verify_order(module.graph)
    for node in module.graph.nodes:
        if node.op == "call_function" and not ("val" in node.meta and META_KEY in node.meta):
            raise PassError(
                f"node `{node.name}` ({node.target}) lacks metadata",
                expected=f"'val' and {META_KEY!r} in node.meta",
                found=", ".join(sorted(node.meta)) or "nothing",
            )
    for name, nested in module.named_modules():
        if isinstance(nested, GraphModule):
            _verify_symbols(nested.graph, resolved, f" of nested graph {name}" if name else "")


def verify_order(graph: Graph) -> None:
    """Rule 1. Raises PassError."""
    try:
        graph.lint()
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]  # the other lines are the whole graph
        raise PassError("the graph is malformed", expected="topological order", found=reason) from error
    for node in graph.nodes:
        if node.op not in _KINDS:
            raise PassError(
                f"node `{node.name}` is of a kind that no pass knows",
                expected=" or ".join(_KINDS),
                found=f"{node.op} of {node.target}",
                fix="write graph.call_function(torch.ops.aten....)",
            )


def _verify_symbols(graph: Graph, resolved: sympy.Symbol | None, of: str) -> None:
    known: dict[int, set[sympy.Symbol]] = {}
    defined: set[sympy.Symbol] = set()
    for node in graph.nodes:
        if _is_symbolic(node.args) or _is_symbolic(list(node.kwargs.values())):
            raise PassError(
                f"node `{node.name}`{of} ({node.target}) has a symbolic number among its arguments",
                expected="numbers, or nodes that compute them",
                found=f"args {node.args}, kwargs {dict(node.kwargs)}",
                where=symbols.source_of(node),
            )
        value = node.meta.get("val")
        if id(value) not in known:
            known[id(value)] = symbols.free_symbols(value) or _NONE
        carried = known[id(value)]
        if not carried:
            continue
        if resolved in carried:
            raise _stray(node, of, f"no size that depends on {resolved}, which is a number by now")
        if node.op == "placeholder" or operators.makes_symbols(node):
            defined |= carried
        elif not carried <= defined:
            unknown = ", ".join(sorted(map(str, carried - defined)))
            raise _stray(node, of, f"an input or an earlier operator that defines {unknown}")


def _is_symbolic(argument: Any) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(map(_is_symbolic, argument))
    return isinstance(argument, symbols.SYMBOLIC_SCALARS)


def _stray(node: Node, of: str, expected: str) -> PassError:
    value = node.meta["val"]
    shape = f"shape {list(map(str, value.shape))}" if hasattr(value, "shape") else f"value {value}"
    return PassError(
        f"node `{node.name}`{of} ({node.target}) carries a stray symbol",
        expected=expected,
        found=shape,
        where=symbols.source_of(node),
    )
