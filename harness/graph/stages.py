"""The rules that a graph must obey between passes. A stage, such as `OPEN`, is a set of rules.

A row of the pass list may state the stage that its pass leads to. After each pass, the first broken rule of the current
stage is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from bitproof.harness.graph import verify
from bitproof.harness.graph.tracing.trace import ChunkSymbol
from bitproof.harness.graph.verify import Facts, PassEffect, Rule


@dataclass(frozen=True)
class GraphStage:
    """A set of rules for the graph between two passes."""

    name: str
    rules: tuple[Rule, ...]

    def check(self, module: GraphModule, before: Facts, chunk_symbol: ChunkSymbol) -> Facts:
        """Check the graph after a pass, and return its facts. Raises PassError for a broken rule.

        `before` are the facts that the check before the pass returned.
        """
        change = PassEffect(module, before, Facts.of(module), chunk_symbol.symbol)
        for rule in self.rules:
            rule(change)
        return change.after


_IS_A_GRAPH = (verify.in_order, verify.has_metadata, verify.only_computes, verify.reads_nodes)
_IS_THE_STEP = (verify.defines_symbols, verify.keeps_halves, verify.is_called_alike, verify.keeps_checks)

OPEN = GraphStage("open", (*_IS_A_GRAPH, *_IS_THE_STEP))
"""After tracing: sizes may contain the chunk symbol."""

RESOLVED = GraphStage("resolved", (*_IS_A_GRAPH, verify.is_resolved, *_IS_THE_STEP))
"""After a pass that replaces the chunk symbol by a number. Data-dependent sizes stay symbolic."""
