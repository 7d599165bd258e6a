"""Steps that are traced once in a process, for all tests that run passes over them."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from bitproof.harness.case import GRAPH, Case
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.systems.graph import GraphProgram, TracedStep, finish, trace
from bitproof.harness.systems.graph_key import step_part
from tests.harness.graph.graphs import copied

CPU = torch.device("cpu")


@functools.cache
def _traced(step: Case, system: str) -> TracedStep:
    return trace(step, CPU, system=system)


def traced(case: Case, system: str = GRAPH) -> TracedStep:
    """A case's step, for passes to change: a copy of one trace for all cases that differ in passes alone."""
    step = _traced(step_part(case), system)
    return replace(step, joint=copied(step.joint))


def prepare_traced(case: Case, options: GraphOptions | None = None, system: str = GRAPH) -> GraphProgram:
    """As `prepare` does, over such a copy."""
    return finish(traced(case, system), case, CPU, options)
