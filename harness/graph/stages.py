"""What must hold of the graph, and where in the pass list: each stage is the rules that hold once it is reached.

A row of the pass list says which stage it leaves the graph in; its runner checks that stage's rules after each pass.
The first rule that does not hold is the one that is told, so what others build on comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from bitproof.harness.graph import verify
from bitproof.harness.graph.tracing.trace import ChunkSymbol
from bitproof.harness.graph.verify import Facts, PassEffect, Rule


@dataclass(frozen=True)
class GraphStage:
    """How far a graph has come, and what holds of every graph that has come so far."""

    name: str
    rules: tuple[Rule, ...]

    def check(self, module: GraphModule, before: Facts, chunk_symbol: ChunkSymbol) -> Facts:
        """Raise PassError unless the rules hold of the graph that a pass left; returns the graph's facts."""
        change = PassEffect(module, before, Facts.of(module), chunk_symbol.symbol)
        for rule in self.rules:
            rule(change)
        return change.after


_IS_A_GRAPH = (verify.in_order, verify.has_metadata, verify.only_computes, verify.reads_nodes)
_IS_THE_STEP = (verify.defines_symbols, verify.is_called_alike, verify.keeps_checks)

OPEN = GraphStage("open", (*_IS_A_GRAPH, *_IS_THE_STEP))
"""As it was traced: values may carry the chunk symbol."""

RESOLVED = GraphStage("resolved", (*_IS_A_GRAPH, verify.is_resolved, *_IS_THE_STEP))
"""The chunk symbol is a number. Sizes that the data decide stay open."""
