"""Refuses chunked modules that call higher-order operators whose nested graphs cannot be divided.

- FlexAttention and its backward have rules, so they are accepted.
- An operator that calls a single nested graph with its own operands, such as `wrap`, is followed through that graph.
- `cond`, `while_loop`, `map`, `scan` and `associative_scan` are refused.

While the size of the chunked dim is a symbol, the trace of a refused operator may fail or succeed. `refuse_failed`
handles a failed trace, from its traceback. `refuse_calls` handles a successful trace, from its graph.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable

import sympy
from torch.fx import Node

from bitproof.harness.errors import ChunkError
from bitproof.harness.graph import operators, symbols
from bitproof.harness.operators import named

_HOME = "torch._higher_order_ops."
_FOLLOWED = frozenset({"flex_attention"})


def refuse_calls(calls: Iterable[tuple[Node, str]], symbol: sympy.Symbol) -> None:
    """Raise ChunkError for the first call that passes chunked rows to nested graphs which cannot be followed.

    - `calls`: pairs (call, name of the chunked module that makes it).
    - `symbol`: the size of the chunked dim.
    """
    for node, module in calls:
        graphs = [x.name for x in node.all_input_nodes if operators.graph_of(x) is not None]
        # Without nested graphs there is nothing to divide. A call of a single graph with its own operands is followed
        # through that graph, and the table of operators has rules for the others that can be followed.
        if not graphs or operators.nested_call(node) or named(operators.operator_name(node)).is_understood:
            continue
        if any(symbols.carries(x.meta.get("val"), symbol) for x in node.all_input_nodes):
            found = f"node `{node.name}`, which runs {', '.join(graphs)}"
            raise _refusal(module, operators.operator_name(node), found, symbols.source_of(node))


def refuse_failed(module: str, error: Exception, where: str | None) -> None:
    """Raise ChunkError if a higher-order operator raised `error` during the trace of a chunked module.

    `module` is the module's name. `where` is the line of the user's code, or None.
    """
    # The file of an operator's rule has the operator's name: torch/_higher_order_ops/cond.py.
    homes = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    called = next((home.removeprefix(_HOME) for home in homes if home.startswith(_HOME)), None)
    # FlexAttention is followed, so its error is an ordinary one.
    if called is not None and called not in _FOLLOWED:
        found = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise _refusal(module, called, found, where) from error


def _refusal(module: str, operator: str, found: str, where: str | None) -> ChunkError:
    return ChunkError(
        f"cannot chunk {module}: it calls {operator.removesuffix('_impl')}, whose nested graphs are not split in two",
        expected="a module without higher-order operators, except for flex_attention",
        found=found,
        where=where,
        fix="write it without (a choice by data as torch.where, a loop as Python's for), or choose other modules",
    )
