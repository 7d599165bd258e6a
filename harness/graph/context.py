"""A pass's other input and output besides the graph, so that nothing a pass needs is global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitproof.harness.case import Chunking, Memory, Pipeline
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.harness.graph.tracing.trace import ChunkSymbol, Guard


@dataclass(frozen=True)
class PassContext:
    """The settings of one case's pipeline. `chunk_groups` names the groups whose collectives may run once per chunk,
    including those that isolation may make. `groups` describes every group; passes may add some. `module_calls` has the
    model's modules and the number of their calls in the traced step. `is_joint`: the step was exported as a joint
    graph, to be partitioned. `cuts` says where pipeline stages begin; passes get one stage's graph at a time.

    `facts` are a pass's JSON values for the report; the runner empties it before each pass.
    """

    chunk_symbol: ChunkSymbol
    chunking: Chunking | None = None
    chunk_groups: frozenset[str] = frozenset()
    guards: tuple[Guard, ...] = field(default=())
    memory: Memory = field(default_factory=Memory)
    pipeline: Pipeline = field(default_factory=Pipeline)
    groups: GroupTable = field(default_factory=GroupTable)
    module_calls: Mapping[str, int] = field(default_factory=dict)
    is_joint: bool = False
    cuts: Cuts = field(default_factory=Cuts)
    facts: dict[str, Any] = field(default_factory=dict)
