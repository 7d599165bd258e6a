"""Replace the chunk symbol by its number everywhere.

Needs:    `context.chunk_symbol`; the conditions that tracing deferred, in `context.guards`.
Promises: no value, no argument and no nested graph module has the symbol in a size; same bits.
Refuses:  a condition that is false for the whole extent or, in a chunked graph, for half of it.

1. Check every deferred condition with the numbers that the run will have.
2. Write the graph again with numbers for symbolic sizes (after chunking, none are left).
3. Drop scalar nodes that have no readers any more.
"""

from __future__ import annotations

import logging
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.errors import PassError
from bitproof.harness.graph import symbols
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.dead_code import drop_dead_code
from bitproof.harness.graph.writer import GraphWriter

log = logging.getLogger(__name__)


def concretize_symbols(module: GraphModule, context: PassContext) -> GraphModule:
    # 1. Conditions first: numbers that violate them would give a wrong graph.
    _check_guards(context)
    symbol, extent = context.chunk_symbol.symbol, context.chunk_symbol.hint
    # 2. A chunked graph has no symbol any more, so it is not written again.
    if symbols.graph_carries(module, symbol):
        module = _write_with_numbers(module, symbol, extent)
    # 3. The scalars, which the new graph has as numbers.
    drop_dead_code(module)
    return module


def _check_guards(context: PassContext) -> None:
    whole = context.chunk_symbol.hint
    extents = (whole, whole // 2) if context.chunking else (whole,)
    # Modules in chunks run with half of the extent, others with all of it; the traced path must be right for both.
    for guard in context.guards:
        for extent in extents:
            if guard.condition.subs(context.chunk_symbol.symbol, extent) != True:  # noqa: E712 (a sympy truth value)
                raise PassError(
                    f"a condition that tracing relied on is false for {context.chunk_symbol.symbol} = {extent}",
                    expected=str(guard.condition),
                    found=f"{context.chunk_symbol.symbol} = {extent}",
                    where=guard.source,
                    fix="choose a size for which the model takes the traced path in every chunk",
                )
    log.debug("%d deferred conditions hold for %s", len(context.guards), extents)


def _write_with_numbers(module: GraphModule, symbol: Any, extent: int) -> GraphModule:
    writer = GraphWriter(module, symbol, extent)
    env: dict[Node, Node] = {}

    def read(node: Node) -> Any:
        if symbols.is_scalar_of(node.meta.get("val"), symbol):
            # A scalar has no node in the new graph: each reader gets its number.
            return symbols.number_of(node, symbol, extent)
        return env[node]

    for node in module.graph.nodes:
        args, kwargs = (map_arg(node.args, read), map_arg(node.kwargs, read))
        if node.op == "placeholder":
            env[node] = writer.placeholder(node)
        elif node.op == "get_attr":
            env[node] = writer.get_attr(node, extent)
        elif node.op == "output":
            writer.output(node, args)
        elif not symbols.is_scalar_of(node.meta.get("val"), symbol):
            env[node] = writer.call(node, args, kwargs)
    return writer.module()
