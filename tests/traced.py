"""Steps that are traced once in a process, for all tests that run passes over them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from bitproof.harness.case import GRAPH, Case
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.systems import graph
from bitproof.harness.systems.graph import TracedStep, finish, trace
from bitproof.harness.systems.graph_key import step_part
from bitproof.harness.systems.graph_program import GraphProgram
from tests.harness.graph.graphs import copied

CPU = torch.device("cpu")


@functools.lru_cache(maxsize=12)  # whole steps, of which slow tests trace many
def _traced(step: Case, system: str) -> TracedStep:
    return trace(step, CPU, system=system)


def traced(case: Case, system: str = GRAPH) -> TracedStep:
    """A case's step, for passes to change: a copy of one trace for all cases that differ in passes alone."""
    step = _traced(step_part(case), system)
    return replace(step, joint=copied(step.joint))


def prepare_traced(case: Case, options: GraphOptions | None = None, system: str = GRAPH) -> GraphProgram:
    """As `prepare` does, over such a copy."""
    return finish(traced(case, system), case, CPU, options)


def share_traces(patch: pytest.MonkeyPatch) -> None:
    """Let all that traces the graph's step in this process take such copies."""
    own = graph.trace

    def shared(case: Case, device: torch.device, enter: Any = None, system: str = GRAPH, rank: int = 0) -> TracedStep:
        if device != CPU or rank or case.autoplace is not None:
            return own(case, device, enter or (lambda place: None), system, rank)
        return traced(case, system)

    patch.setattr(graph, "trace", shared)
