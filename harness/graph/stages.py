"""The rules for the graph at each point of the pass list.

A stage is a set of rules. A row of the pass list may name the graph's stage after the pass. After each pass the first
violated rule of the current stage is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from bitproof.harness.graph import verify
from bitproof.harness.graph.tracing.trace import ChunkSymbol
from bitproof.harness.graph.verify import Facts, PassEffect, Rule


@dataclass(frozen=True)
class GraphStage:
    """A stage of the graph between passes, and the rules for every graph in it."""

    name: str
    rules: tuple[Rule, ...]

    def check(self, module: GraphModule, before: Facts, chunk_symbol: ChunkSymbol) -> Facts:
        """Check a graph after a pass, given its facts `before` the pass. Returns its new facts. Raises PassError."""
        change = PassEffect(module, before, Facts.of(module), chunk_symbol.symbol)
        for rule in self.rules:
            rule(change)
        return change.after


_IS_A_GRAPH = (verify.in_order, verify.has_metadata, verify.only_computes, verify.reads_nodes)
_IS_THE_STEP = (verify.defines_symbols, verify.keeps_halves, verify.is_called_alike, verify.keeps_checks)

OPEN = GraphStage("open", (*_IS_A_GRAPH, *_IS_THE_STEP))
"""After tracing: values may carry the chunk symbol."""

RESOLVED = GraphStage("resolved", (*_IS_A_GRAPH, verify.is_resolved, *_IS_THE_STEP))
"""After a pass that replaces the chunk symbol by a number. Data-dependent sizes stay symbolic."""
