"""What passes are told, besides the graph: nothing a pass needs is global."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.case import Chunking
from harness.graph.trace import ChunkSymbol, Guard


@dataclass(frozen=True)
class PassContext:
    """The settings of one case's pipeline. `expert_groups` names the groups whose collectives may run once a chunk."""

    chunk_symbol: ChunkSymbol
    chunking: Chunking | None = None
    expert_groups: frozenset[str] = frozenset()
    guards: tuple[Guard, ...] = field(default=())
