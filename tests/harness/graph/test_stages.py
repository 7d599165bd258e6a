"""Which rules hold where in the column, and how a row moves the graph from one stage to the next."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch.fx import GraphModule

from bitproof.harness.errors import PassError
from bitproof.harness.graph import verify as rules
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.pipeline import PassRow, build_pipeline, run_pipeline
from bitproof.harness.graph.stages import OPEN, RESOLVED
from bitproof.harness.graph.verify import Facts
from tests.harness.graph.graphs import Applied, D, Layers, Sketch, context_of, parameter, trace


def test_a_resolved_graph_is_held_to_all_that_an_open_one_is_and_to_one_thing_more() -> None:
    assert [rule for rule in RESOLVED.rules if rule not in OPEN.rules] == [rules.is_resolved]
    assert [rule for rule in RESOLVED.rules if rule is not rules.is_resolved] == list(OPEN.rules)


def test_a_graph_whose_input_has_the_chunk_symbol_is_open_and_not_resolved() -> None:
    sketch = Sketch()
    module = sketch.finish(sketch.call(torch.ops.aten.sum.default, sketch.placeholder("x", sketch.n, 8)))
    facts = OPEN.check(module, Facts.of(module), sketch.symbol)
    assert facts == Facts(num_inputs=1, num_outputs=1, checks=frozenset())
    with pytest.raises(PassError, match="carries a stray symbol"):
        RESOLVED.check(module, facts, sketch.symbol)


def leave(module: GraphModule, context: PassContext) -> GraphModule:
    return module


def test_a_row_leaves_the_graph_in_the_stage_that_it_names() -> None:
    joint = trace(Layers(Applied(lambda m, x: x * m.w, w=parameter(D))))
    context = context_of(joint, "layers.*")
    run_pipeline(joint.module, [PassRow(leave)], context)
    with pytest.raises(PassError, match="carries a stray symbol") as error:
        run_pipeline(joint.module, [PassRow(leave, leaves=RESOLVED)], context)
    assert error.value.where is not None and error.value.where.endswith("pass leave")


def test_of_a_chunked_case_two_rows_resolve_the_symbol() -> None:
    joint = trace(Layers(Applied(lambda m, x: x * m.w, w=parameter(D))))
    resolving = [row.__name__ for row in build_pipeline(context_of(joint, "layers.*")) if row.leaves is RESOLVED]
    assert resolving == ["chunk", "concretize_symbols"]


def test_a_row_says_what_it_follows_and_what_it_is_bound_to_and_hands_that_on() -> None:
    def count(module: GraphModule, context: PassContext, blocks: str) -> GraphModule:
        context.facts["blocks"] = blocks
        return module

    joint = trace(Layers(Applied(lambda m, x: x * m.w, w=parameter(D))))
    context = context_of(joint, "layers.*")
    row = PassRow(count, follows=context.memory, bound={"blocks": "layers.0"})
    _, [report] = run_pipeline(joint.module, [row], context)
    assert report.settings == {**asdict(context.memory), "blocks": "layers.0"}
    assert (report.name, report.facts) == ("count", {"blocks": "layers.0"})
