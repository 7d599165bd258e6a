"""The rules for a graph between passes. Each rule raises PassError if a pass has broken it.

`stages.py` states which rules apply when. Nested graphs must obey them, too, and may only compute from the operands of
their operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import sympy
from torch.fx import Graph, GraphModule, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph import operators, symbols
from bitproof.harness.graph.analysis.halves import HALF_KEY
from bitproof.harness.graph.origin import META_KEY

# Each rule reads every node once, and a value that many nodes share once: the cost is linear in the size of the graph.
_NONE: set[sympy.Symbol] = set()
_KINDS = ("placeholder", "get_attr", "call_function", "output")


class Facts(NamedTuple):
    """Facts about a graph that every pass must preserve.

    `checks` has a text for each assertion in the graph: its operator and message.
    """

    num_inputs: int
    num_outputs: int
    checks: frozenset[str]

    @staticmethod
    def of(module: GraphModule) -> Facts:
        """Return a graph's facts. Call it before a pass, which may change the graph in place."""
        outputs = [argument for node in module.graph.find_nodes(op="output") for argument in node.args]
        num_outputs = sum(len(values) if isinstance(values, (list, tuple)) else 1 for values in outputs)
        # A set, since a pass may repeat a check, once for each chunk.
        checks = frozenset(
            " ".join([operators.operator_name(node), *(repr(x) for x in node.args if isinstance(x, str))])
            for _, nested in _graphs(module)
            for node in nested.graph.nodes
            if node.op == "call_function" and operators.is_check(node)
        )
        return Facts(len(module.graph.find_nodes(op="placeholder")), num_outputs, checks)


@dataclass(frozen=True)
class PassEffect:
    """A graph after a pass, for the rules that verify it.

    - `before`, `after`: the graph's facts before and after the pass.
    - `chunk_symbol`: the size of the chunked dim; None if there is none.
    """

    module: GraphModule
    before: Facts
    after: Facts
    chunk_symbol: sympy.Symbol | None

    @cached_property
    def graphs(self) -> list[tuple[str, Graph]]:
        """The graph and its nested graphs, as pairs (description, graph).

        The description is "" for the graph itself.
        """
        return [(f" of nested graph {name}" if name else "", nested.graph) for name, nested in _graphs(self.module)]

    @cached_property
    def carriers(self) -> list[tuple[str, list[tuple[Node, set[sympy.Symbol]]]]]:
        """The values with symbols: for each graph a pair (description, list of pairs (node, the symbols in its value)).

        Nodes without symbols are left out.
        """
        return [(of, _carriers(graph)) for of, graph in self.graphs]


Rule = Callable[[PassEffect], None]


def in_order(change: PassEffect) -> None:
    for of, graph in change.graphs:
        verify_order(graph, of)


def verify_order(graph: Graph, of: str = "") -> None:
    """Raise PassError unless a graph's nodes are in topological order, and of supported kinds.

    `of` describes a nested graph in errors.
    """
    try:
        graph.lint()
    except (RuntimeError, ValueError) as error:
        # The other lines are the whole graph.
        reason = str(error).splitlines()[0]
        which = of.removeprefix(" of ") or "the graph"
        raise PassError(f"{which} is malformed", expected="topological order", found=reason) from error
    for node in graph.nodes:
        if node.op not in _KINDS:
            raise PassError(
                f"node `{node.name}`{of} is of an unknown kind",
                expected=" or ".join(_KINDS),
                found=f"{node.op} of {node.target}",
                fix="write graph.call_function(torch.ops.aten....)",
            )


def has_metadata(change: PassEffect) -> None:
    """Raise PassError unless every call has a fake value and an origin. Calls in nested graphs need no origin."""
    for of, graph in change.graphs:
        needed = ("val",) if of else ("val", META_KEY)
        for node in graph.nodes:
            if node.op == "call_function" and not all(key in node.meta for key in needed):
                raise PassError(
                    f"node `{node.name}`{of} ({node.target}) lacks metadata",
                    expected=f"{' and '.join(map(repr, needed))} in node.meta",
                    found=", ".join(sorted(node.meta)) or "nothing",
                )


def only_computes(change: PassEffect) -> None:
    """Raise PassError unless nested graphs only compute from the operands of their operators."""
    for of, graph in change.graphs:
        # The top graph may have effects.
        for node in graph.nodes if of else ():
            if hidden := operators.hidden_effect(node):
                raise PassError(
                    f"node `{node.name}`{of} ({node.target}) does more than compute from operands",
                    expected="a pure function of the operator's arguments, since passes know it by its operands",
                    found=hidden,
                    fix="hand the operator each tensor that its function reads; draw, write and communicate outside",
                )


def reads_nodes(change: PassEffect) -> None:
    """Raise PassError if a call has a symbolic number as an argument.

    The argument must be the node that computes the number instead.
    """
    # Only nodes have values when the graph runs.
    for of, graph in change.graphs:
        for node in graph.nodes:
            if _is_symbolic(node.args) or _is_symbolic(list(node.kwargs.values())):
                raise PassError(
                    f"node `{node.name}`{of} ({node.target}) has a symbolic number among its arguments",
                    expected="numbers, or nodes that compute them",
                    found=f"args {node.args}, kwargs {dict(node.kwargs)}",
                    where=symbols.source_of(node),
                )


def is_resolved(change: PassEffect) -> None:
    """Raise PassError if a value still depends on the chunk symbol."""
    symbol = change.chunk_symbol
    for of, carriers in change.carriers:
        for node, carried in carriers:
            if symbol in carried:
                raise _stray(node, of, f"no size that depends on {symbol}, which is a number by now")


def defines_symbols(change: PassEffect) -> None:
    """Raise PassError if a value has a symbol that neither a graph input nor an earlier call defines.

    A call may define symbols only if its operator reads data, or is an all-to-all (see fake_mode.py).
    """
    for of, carriers in change.carriers:
        defined: set[sympy.Symbol] = set()
        for node, carried in carriers:
            if node.op == "placeholder" or operators.makes_symbols(node):
                defined |= carried
            # Nodes are in order here, so `defined` has all symbols of earlier nodes.
            elif not carried <= defined:
                unknown = ", ".join(sorted(map(str, carried - defined)))
                raise _stray(node, of, f"an input or an earlier operator that defines {unknown}")


def keeps_halves(change: PassEffect) -> None:
    """Raise PassError if a call of the forward half comes after a call of the backward half."""
    first: Node | None = None
    for node in change.module.graph.nodes:
        half = node.meta.get(HALF_KEY)
        if half == "backward":
            first = first or node
        elif half == "forward" and first is not None:
            raise PassError(
                f"`{node.name}` is in the forward half, behind a call of backward",
                expected="the calls of forward, then those of backward",
                found=f"it behind `{first.name}`",
                where=symbols.source_of(node),
            )


def is_called_alike(change: PassEffect) -> None:
    """Raise PassError if a pass has changed the number of inputs or outputs."""
    # The first two fields are the numbers of inputs and outputs.
    if change.after[:2] != change.before[:2]:
        raise PassError(
            "the graph has other inputs or outputs than the traced graph",
            expected="{} inputs and {} outputs".format(*change.before),
            found="{} inputs and {} outputs".format(*change.after),
        )


def keeps_checks(change: PassEffect) -> None:
    """Raise PassError if a pass has removed an assertion."""
    if dropped := sorted(change.before.checks - change.after.checks):
        raise PassError(
            "the graph lost a check of the traced graph, so it would continue where eager raises",
            expected="every assertion of the graph before this pass",
            found="without " + ", ".join(dropped),
            fix="keep calls of aten._assert_async, aten._assert_scalar and their like: they have no readers",
        )


def _graphs(module: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    return ((name, nested) for name, nested in module.named_modules() if isinstance(nested, GraphModule))


def _carriers(graph: Graph) -> list[tuple[Node, set[sympy.Symbol]]]:
    known: dict[int, set[sympy.Symbol]] = {}
    found = []
    for node in graph.nodes:
        value = node.meta.get("val")
        # Many nodes share a fake tensor, and a value's symbols are slow to find.
        if id(value) not in known:
            known[id(value)] = symbols.free_symbols(value) or _NONE
        if carried := known[id(value)]:
            found.append((node, carried))
    return found


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
