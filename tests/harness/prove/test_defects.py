"""The twelve defects that localizing is held to, and those of passes: none is proved, and the right module is shown."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

from cases.chunking import transformer_batch
from harness.case import Parallelism
from harness.graph.options import GraphOptions
from harness.prove.answers import prove_graphs
from harness.prove.export import RefusedError, export_graph
from harness.prove.prove import _traced_reference
from harness.systems.graph import step_graph
from tests.harness.localize.defects import DEFECTS

pytestmark = [pytest.mark.traces, pytest.mark.slow]

SHOWN_LATER = {"chunks_joined_in_reverse"}
"""Joining moves elements, and casts pass through it: sides part at the next opaque call, in another module."""

CASE = replace(transformer_batch, parallelism=Parallelism(world_size=2))


@functools.cache
def sides():
    """The reference as data, and how to write down a candidate."""
    reference = _traced_reference(CASE, torch.device("cpu"))
    candidate, candidate_groups = step_graph(CASE, CASE.candidate, torch.device("cpu"), GraphOptions())
    write = functools.partial(
        export_graph,
        names=reference.names,
        inputs=reference.inputs,
        outputs=reference.outputs,
        groups=candidate_groups,
    )
    return reference.graph, candidate.module, write


def shown(module):
    """What a mutant is not proved for: the modules and directions that answers show, or that a refusal names."""
    reference, _, write = sides()
    try:
        proof = prove_graphs(reference, write(module))
    except RefusedError as error:
        return "REFUSED", str(error.where)
    places = {
        (call.module, call.direction)
        for answer in proof.answers
        if answer.finding
        for first in answer.finding.first
        for call in first
    }
    return proof.verdict, places


def test_the_graph_without_a_defect_is_proved():
    assert shown(sides()[1])[0] == "PROVED"


@pytest.mark.parametrize("defect", [d for d in DEFECTS if d.edit], ids=lambda defect: defect.name)
def test_a_defect_is_not_proved_and_shown_where_it_is(defect):
    module = copy.deepcopy(sides()[1])
    defect.edit(module)
    verdict, places = shown(module)
    if verdict == "REFUSED":  # a call of a Python function, which is named
        assert places.startswith(f"{defect.module} ({defect.direction})")
    else:
        assert verdict == "NOT PROVED"
        if defect.name in SHOWN_LATER:
            return
        assert any(
            direction == defect.direction and (defect.module is None or (module or "").startswith(defect.module))
            for module, direction in places
        )
