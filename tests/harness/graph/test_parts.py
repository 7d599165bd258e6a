"""A mixture's dispatch, compute and combine, as its model annotates them: in every graph, after every pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.fx import GraphModule

from bitproof.builtin_cases import CASES, all_cases
from bitproof.harness.case import GRAPH, JOINT, Case
from bitproof.harness.graph import operators
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.pipeline import run_pipeline
from bitproof.harness.systems import graph as graph_system
from tests.small import small
from tests.sweeps import sweep
from tests.traced import prepare_traced

PARTS_OF = {"all_to_all_single": {"dispatch", "combine"}, "_grouped_mm": {"compute"}}
"""What experts alone call, and in which parts."""

Marks = set[tuple[str | None, str, str | None]]


def marks(module: GraphModule) -> Marks:
    """Module, direction and part of all that belongs to a part."""
    found = {origin_of(node) for node in module.graph.nodes if origin_of(node).part}
    return {(origin.module, origin.direction, origin.part) for origin in found}


def wrongly_marked(module: GraphModule) -> list[str]:
    calls = [node for node in module.graph.nodes if operators.operator_name(node) in PARTS_OF]
    return [
        f"{x.name} of {origin_of(x)}" for x in calls if origin_of(x).part not in PARTS_OF[operators.operator_name(x)]
    ]


def graphs_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Marks, list[str]]]:
    """What is marked as the step was traced, and after each of its passes."""
    seen: dict[str, tuple[Marks, list[str]]] = {}

    def watched(module, passes, context, observe=None, enter=lambda place: None):
        def look(name: str, left: GraphModule) -> None:
            seen[name] = marks(left), wrongly_marked(left)
            if observe is not None:
                observe(name, left)

        return run_pipeline(module, passes, context, look, enter)

    monkeypatch.setattr(graph_system, "run_pipeline", watched)
    uncompiled = replace(case, pipeline=replace(case.pipeline, backend="fx", regions=()))
    prepare_traced(uncompiled, system=case.candidate)
    return seen


def check(seen: dict[str, tuple[Marks, list[str]]]) -> None:
    [traced, *_] = seen.values()
    assert {part for _, _, part in traced[0]} == {"dispatch", "compute", "combine"}
    for name, (found, wrong) in seen.items():
        assert not wrong, name
        assert found >= traced[0], (name, traced[0] - found)


QUICK = ["moe_seq", "experts_batch_nightly", "joint_deepseek_ep2"]
"""Chunked; with every optional pass; exported and divided. With one layer by day, whole by night."""

WITHOUT_EXPERTS = ["inductor_dense"]
"""Of DeepSeek-V3 the first layers alone."""

TRACED = [
    case.name
    for case in all_cases()
    if case.candidate in (GRAPH, JOINT) and case.model.family != "llama3" and case.name not in WITHOUT_EXPERTS
]


@pytest.mark.parametrize("name", sweep(QUICK, "moe_seq"))
def test_every_pass_keeps_the_parts_of_a_layer_of_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(graphs_of(small(CASES[name]), monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_every_pass_keeps_the_parts_of_a_mixture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(graphs_of(CASES[name], monkeypatch))
