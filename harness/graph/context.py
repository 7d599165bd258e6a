"""The context of a pass: everything that a pass reads and writes besides the graph. Passes use no global state."""

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
    """The settings of a case's graph pipeline, and facts about the step.

    - `chunk_groups`: names of process groups whose collectives may run once per chunk, such as the group of experts.
    - `guards`: the conditions on sizes that the trace assumed.
    - `groups`: the table of all process groups, to which passes may add groups.
    - `module_calls`: module name -> number of its calls in the traced step.
    - `is_joint`: True if torch exported the step as a joint graph, which is then partitioned.
    - `cuts`: the division into pipeline stages. A pass gets the graph of one stage at a time.
    - `facts`: the pass's JSON values for the report. It is emptied before each pass.
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
