"""The context of a pass: all that a pass reads and writes besides the graph, so that nothing is global."""

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
    """The settings of a case's pipeline, and facts about its step.

    - `chunk_groups`: the names of groups whose collectives may run once per chunk, including groups that the isolation
      passes may add.
    - `guards`: the assumptions about sizes that the trace made.
    - `groups`: the table of all process groups; passes may add groups.
    - `module_calls`: for each of the model's modules, the number of its calls in the traced step.
    - `is_joint`: whether the step was exported as a joint graph, to be partitioned.
    - `cuts`: the division into pipeline stages; passes get a single stage's graph at a time.
    - `facts`: a pass's JSON values for the report; the runner empties it before each pass.
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
