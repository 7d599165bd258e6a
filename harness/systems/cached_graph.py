"""Stores traced graphs in a cache on disk, for later runs of the case.

Needs:    a graph cache whose key covers everything that decides the graph.
Promises: the program has exactly the traced code, which its hash proves. Its hazards (races and deadlocks) are stored
          as well: they depend on the devices of values, which are not stored.
Refuses:  graphs that cannot be written as plain data, and graphs whose source files were edited during the trace.

Graphs changed by a user's pass or based on a user's cost model are not stored, and neither is compiled code.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Container

from bitproof.harness.case import Case
from bitproof.harness.errors import BitproofError
from bitproof.harness.graph.collector import gc_paused
from bitproof.harness.graph.graph_json import Json, graph_from_json, graph_to_json
from bitproof.harness.graph.groups import Group
from bitproof.harness.records import PassReport
from bitproof.harness.systems.graph_key import GRAPH, GraphCache
from bitproof.harness.systems.graph_program import GraphProgram, code_hash

logger = logging.getLogger(__name__)


@gc_paused()
def read_program(graph_cache: GraphCache) -> GraphProgram | None:
    """Return the program in a graph cache; None if the cache has none, or if it is invalid."""
    began = time.perf_counter()
    kept = graph_cache.read(GRAPH)
    if kept is None:
        return None
    try:
        program = program_from_json(kept, began)
        # Hazards cannot be computed again: that would need the devices of values, which are not stored.
        program.set_hazards([str(line) for line in kept["hazards"]])
        return program
    # A damaged entry of the cache is no error of this run, which traces the step instead.
    except (BitproofError, AttributeError, KeyError, TypeError, ValueError) as error:
        logger.warning("the kept graph is not used: %s", error)
        return None


def keep_program(graph_cache: GraphCache, program: GraphProgram, case: Case) -> bool:
    try:
        value = program_to_json(program) | {"hazards": program.hazards(case)}
    except BitproofError as error:
        logger.info("this graph cannot be kept: %s", error)
        return False
    return graph_cache.keep(GRAPH, value)


def program_to_json(program: GraphProgram) -> dict[str, object]:
    """Convert a program to JSON values. Raises UnkeptError for a graph that JSON cannot represent."""
    return {
        "graph": graph_to_json(program.module),
        "code_hash": program.code_hash,
        "parameter_names": program.parameter_names,
        "buffer_names": program.buffer_names,
        "groups": [[name, *dataclasses.astuple(group)] for name, group in program.groups.items()],
        "passes": [dataclasses.asdict(entry) for entry in program.passes],
    }


def program_from_json(kept: Json, began: float, allowed: Container[str] | None = None) -> GraphProgram:
    """Convert the JSON values that `program_to_json` returns back to a program.

    - `began`: start time of reading.
    - `allowed`: operators that the graph may contain; None for all.

    Raises UnkeptError, ValueError, KeyError, TypeError or AttributeError for invalid values.
    """
    module = graph_from_json(kept["graph"], allowed)
    # Only the hash proves that the graph is the graph that was traced.
    if (found := code_hash(module)) != kept["code_hash"]:
        raise ValueError(f"it has other code than was kept: {found}, not {kept['code_hash']}")
    groups = {
        name: Group(of, tuple(map(tuple, partition)), high_priority=first)
        for name, of, partition, first in kept["groups"]
    }
    return GraphProgram(
        module=module,
        run=module,
        parameter_names=kept["parameter_names"],
        buffer_names=kept["buffer_names"],
        code_hash=kept["code_hash"],
        groups=groups,
        trace_seconds=time.perf_counter() - began,
        # No pass runs for a kept graph, so none takes time.
        passes=[PassReport(**entry | {"seconds": 0.0}) for entry in kept["passes"]],
        is_kept=True,
    )
