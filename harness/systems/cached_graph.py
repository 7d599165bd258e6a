"""A prepared graph that is kept from one run for the next, on the graph cache of its case.

Needs:    a graph cache, so a key of everything that decides the graph.
Promises: a program of the very code that was traced: its hash is compared with the one that was kept beside it. Its
          hazards are those that were found when it was made: what is kept does not say on which device values lie.
Refuses:  to keep what has no form as plain data, and what was made while the files that make it were edited.

Not kept at all are graphs in which a user's pass took part, which may do what it likes; what a backend compiled; and
what follows a cost model of the user's own.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Container

from bitproof.harness.case import Case
from bitproof.harness.errors import BitproofError
from bitproof.harness.graph.collector import collector_paused
from bitproof.harness.graph.groups import Group
from bitproof.harness.graph.plain import Json, graph_of, plain_of
from bitproof.harness.records import PassReport
from bitproof.harness.systems.graph import GraphProgram, code_hash
from bitproof.harness.systems.graph_key import GRAPH, GraphCache

logger = logging.getLogger(__name__)


@collector_paused()
def read_program(graph_cache: GraphCache) -> GraphProgram | None:
    """The program on a graph cache; None where there is none that can be believed."""
    began = time.perf_counter()
    kept = graph_cache.read(GRAPH)
    if kept is None:
        return None
    try:
        program = program_of(kept, began)
        program.remember_hazards([str(line) for line in kept["hazards"]])
        return program
    except (BitproofError, AttributeError, KeyError, TypeError, ValueError) as error:
        logger.warning("the kept graph is not used: %s", error)
        return None


def keep_program(graph_cache: GraphCache, program: GraphProgram, case: Case) -> bool:
    """Put a case's program on its graph cache; whether it was."""
    try:
        value = written(program) | {"hazards": program.hazards(case)}
    except BitproofError as error:
        logger.info("this graph cannot be kept: %s", error)
        return False
    return graph_cache.keep(GRAPH, value)


def written(program: GraphProgram) -> dict[str, object]:
    """A program as JSON values. Raises UnkeptError for a graph that has no form as such."""
    return {
        "graph": plain_of(program.module),
        "code_hash": program.code_hash,
        "parameter_names": program.parameter_names,
        "buffer_names": program.buffer_names,
        "groups": [[name, *dataclasses.astuple(group)] for name, group in program.groups.items()],
        "passes": [dataclasses.asdict(entry) for entry in program.passes],
    }


def program_of(kept: Json, began: float, allowed: Container[str] | None = None) -> GraphProgram:
    """The program that such values say, read since `began`; its operators are among those `allowed`, by default any.

    Raises UnkeptError and ValueError, and what reading a value of another form raises.
    """
    module = graph_of(kept["graph"], allowed)
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
        passes=[PassReport(**entry | {"seconds": 0.0}) for entry in kept["passes"]],
        is_kept=True,
    )
