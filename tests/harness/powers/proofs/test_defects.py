"""Twelve defects of a graph: none is proved, and each is shown at the right module and direction.

Eleven of them are those that localizing is held to. Its twelfth is in the optimizer, which no proof is about; in its
place stands one of a reduction.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.case import Parallelism
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, export_graph
from bitproof.harness.powers.proofs.prover.reference import traced_reference
from bitproof.harness.systems.step_graphs import step_graph
from tests.harness.localize.defects import DEFECTS, Defect, find
from tests.small import small

pytestmark = [pytest.mark.traces, pytest.mark.slow]

CASE = replace(small(transformer_batch, layers=2), parallelism=Parallelism(world_size=2))


def gradient_averaged(module):
    launch = find(module, "reduce_scatter_tensor", "layers.1.attention.wo", "backward", chunk=0)
    launch.args = (launch.args[0], "avg", *launch.args[2:])


AVERAGED = Defect(
    "gradient_averaged", gradient_averaged, "layers.1.attention.wo", "backward", ("reduce_scatter_tensor",)
)
IN_A_GRAPH = [*(defect for defect in DEFECTS if defect.edit), AVERAGED]


@functools.cache
def sides():
    """The reference as data, and how to write down a candidate."""
    reference = traced_reference(CASE, torch.device("cpu"))
    candidate, candidate_groups = step_graph(CASE, CASE.candidate, torch.device("cpu"), GraphOptions())
    write = functools.partial(
        export_graph,
        names=reference.names,
        inputs=reference.inputs,
        outputs=reference.outputs,
        groups=candidate_groups,
    )
    return reference.program.graph, candidate.module, write


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


def test_there_are_twelve():
    assert len(IN_A_GRAPH) == 12


@pytest.mark.parametrize("defect", IN_A_GRAPH, ids=lambda defect: defect.name)
def test_a_defect_is_not_proved_and_shown_where_it_is(defect):
    module = copy.deepcopy(sides()[1])
    defect.edit(module)
    verdict, places = shown(module)
    if verdict == "REFUSED":  # a call of a Python function, which is named
        assert places.startswith(f"{defect.module} ({defect.direction}")
    else:
        assert verdict == "NOT PROVED"
        assert any(
            direction == defect.direction and (defect.module is None or (module or "").startswith(defect.module))
            for module, direction in places
        )
