"""Which passes run, in which order; what each reports; and which one a failure names."""

from __future__ import annotations

import re
from dataclasses import replace
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
from torch.fx import GraphModule

from bitproof.harness.case import Memory, Pipeline
from bitproof.harness.errors import CaseError, ChunkError, PassError
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.pipeline import apply_until, build_pipeline, run_pipeline
from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    batch,
    context_of,
    differing,
    parameter,
    run_eager,
    run_graph,
    trace,
)


@pytest.fixture
def model() -> Layers:
    return Layers(Applied(lambda m, x: x * m.w, w=parameter(D)))


def names(context: PassContext) -> list[str]:
    return [run_pass.__name__ for run_pass in build_pipeline(context)]


def test_the_passes_of_a_chunked_and_of_an_unchunked_case(model: Layers) -> None:
    joint = trace(model)
    assert names(context_of(joint, "layers.*")) == ["clean_up", "chunk", "concretize_symbols", "measure_memory"]
    assert names(context_of(joint)) == ["clean_up", "concretize_symbols", "measure_memory"]


def test_the_map_lists_every_pass_in_the_order_in_which_they_run() -> None:
    page = Path(__file__).parents[3].joinpath("ARCHITECTURE.md").read_text()
    table = page.split("| pass | what it does |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.M) == re.findall(r"PassRow\((\w+)", getsource(build_pipeline))


@pytest.mark.parametrize(
    ("policy", "added"),
    [
        ("none", []),
        ("selective", ["tag_memory", "rematerialize"]),
        ("full", ["tag_memory", "rematerialize"]),
        ("offload", ["tag_memory", "offload", "rematerialize"]),
    ],
)
def test_a_memory_policy_adds_its_passes_before_chunk(model: Layers, policy: Any, added: list[str]) -> None:
    context = replace(context_of(trace(model), "layers.*"), memory=Memory(policy=policy))
    assert names(context) == ["clean_up", *added, "chunk", "concretize_symbols", "measure_memory"]


def test_the_optional_passes_run_between_chunk_and_concretize(model: Layers) -> None:
    context = replace(context_of(trace(model), "layers.*"), pipeline=Pipeline(isolate_groups=True, bucket=True))
    assert names(context) == [
        "clean_up",
        "chunk",
        "isolate_process_groups",
        "bucket",
        "concretize_symbols",
        "measure_memory",
    ]


def test_overlap_comes_when_asked_for_and_before_sizes_become_numbers(model: Layers) -> None:
    context = replace(context_of(trace(model), "layers.*"), pipeline=Pipeline(overlap=True))
    assert names(context) == ["clean_up", "chunk", "overlap", "concretize_symbols", "measure_memory"]


def test_every_pass_reports_its_nodes_before_and_after(model: Layers) -> None:
    joint = trace(model)
    context = context_of(joint, "layers.*")
    traced = len(joint.module.graph.nodes)
    module, reports = run_pipeline(joint.module, build_pipeline(context), context)
    assert [report.name for report in reports] == ["clean_up", "chunk", "concretize_symbols", "measure_memory"]
    assert reports[0].nodes_before == traced
    assert [r.nodes_after for r in reports[:-1]] == [r.nodes_before for r in reports[1:]]
    assert reports[-1].nodes_after == len(module.graph.nodes)
    assert reports[1].nodes_after > reports[1].nodes_before
    assert all(report.seconds > 0 for report in reports)


def test_every_pass_reports_the_operators_whose_number_it_changed(model: Layers) -> None:
    joint = trace(model)
    context = context_of(joint, "layers.*")
    _, reports = run_pipeline(joint.module, build_pipeline(context), context)
    assert reports[1].changed["mul"] == [4, 6]
    assert reports[1].changed["cat"] == [0, 1]
    assert "mean" not in reports[1].changed
    assert reports[2].changed == {}


def test_every_pass_reports_the_settings_that_it_follows(model: Layers) -> None:
    joint = trace(model)
    context = context_of(joint, "layers.*", early=True)
    _, reports = run_pipeline(joint.module, build_pipeline(context), context)
    assert [report.settings for report in reports] == [
        {},
        {"dim": "batch", "modules": "layers.*", "early_grad_accumulation": True, "only": ()},
        {},
        {},
    ]


def test_an_observer_sees_the_traced_graph_and_what_each_pass_left(model: Layers) -> None:
    joint = trace(model)
    context = context_of(joint, "layers.*")
    seen: list[tuple[str, int]] = []
    _, reports = run_pipeline(
        joint.module,
        build_pipeline(context),
        context,
        lambda name, module: seen.append((name, len(module.graph.nodes))),
    )
    assert seen == [("traced", reports[0].nodes_before), *((r.name, r.nodes_after) for r in reports)]


def test_an_observer_sees_a_graph_that_is_then_refused(model: Layers) -> None:
    joint = trace(model)
    seen: list[str] = []
    with pytest.raises(PassError):
        run_pipeline(joint.module, [forget], context_of(joint), lambda name, module: seen.append(name))
    assert seen == ["traced", "forget"]


def test_a_refusal_names_its_pass(model: Layers) -> None:
    joint = trace(model)
    context = context_of(joint, "blocks.*")
    with pytest.raises(ChunkError) as error:
        run_pipeline(joint.module, build_pipeline(context), context)
    assert error.value.where is not None and error.value.where.endswith("pass chunk")


def test_a_crash_names_its_pass(model: Layers) -> None:
    def divide(module: GraphModule, context: PassContext) -> GraphModule:
        raise ZeroDivisionError

    joint = trace(model)
    with pytest.raises(ZeroDivisionError) as error:
        run_pipeline(joint.module, [divide], context_of(joint))
    assert error.value.__notes__ == ["  in pass: divide"]


def forget(module: GraphModule, context: PassContext) -> GraphModule:
    next(node for node in module.graph.nodes if node.op == "call_function").meta.clear()
    return module


def test_a_pass_that_leaves_a_bad_graph_is_blamed_for_it(model: Layers) -> None:
    joint = trace(model)
    with pytest.raises(PassError, match="lacks metadata") as error:
        run_pipeline(joint.module, [forget], context_of(joint))
    assert error.value.where == "pass forget"


def test_no_passes_leave_the_graph_as_it_is(model: Layers) -> None:
    joint = trace(model)
    assert run_pipeline(joint.module, [], context_of(joint)) == (joint.module, [])


def test_a_symbol_may_be_carried_up_to_the_pass_that_resolves_it_and_not_after(model: Layers) -> None:
    def carry(module: GraphModule, context: PassContext) -> GraphModule:
        (node, *_) = module.graph.find_nodes(op="placeholder")
        node.meta["val"] = symbolic
        return module

    joint = trace(model)
    symbolic = joint.module.graph.find_nodes(op="placeholder")[-1].meta["val"]
    context = context_of(joint, "layers.*")
    clean_up, chunk, concretize, _ = build_pipeline(context)
    run_pipeline(joint.module, [clean_up, carry, chunk, concretize], context)
    joint = trace(model)
    with pytest.raises(PassError) as error:
        run_pipeline(joint.module, [clean_up, chunk, carry, concretize], context)
    assert str(error.value) == (
        "PassError: node `arg0_1` (arg0_1) carries a stray symbol\n"
        "  expected: no size that depends on u0, which is a number by now\n"
        "  found: shape ['u0', '6', '8']\n"
        "  came from: no module (forward), pass carry"
    )


def test_a_pass_that_takes_an_input_or_an_output_away_is_refused(model: Layers) -> None:
    def drop_output(module: GraphModule, context: PassContext) -> GraphModule:
        output = module.graph.output_node()
        output.args = (output.args[0][:1],)  # type: ignore[index]
        return module

    def add_input(module: GraphModule, context: PassContext) -> GraphModule:
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            module.graph.placeholder("more")
        return module

    for run_pass, found in ((drop_output, "2 inputs and 1 outputs"), (add_input, "3 inputs and 2 outputs")):
        joint = trace(model)
        with pytest.raises(PassError) as error:
            run_pipeline(joint.module, [run_pass], context_of(joint))
        assert str(error.value) == (
            "PassError: the graph has other inputs or outputs than the traced graph\n"
            "  expected: 2 inputs and 2 outputs\n"
            f"  found: {found}\n"
            f"  came from: pass {run_pass.__name__}"
        )


def test_a_prefix_ends_with_the_pass_that_until_names(model: Layers) -> None:
    column = build_pipeline(context_of(trace(model), "layers.*"))
    prefixes = {until: [p.__name__ for p in apply_until(column, until)] for until in (None, "", "clean_up", "chunk")}
    assert prefixes == {
        None: ["clean_up", "chunk", "concretize_symbols", "measure_memory"],
        "": [],
        "clean_up": ["clean_up"],
        "chunk": ["clean_up", "chunk"],
    }


def test_until_must_name_a_pass_of_the_column(model: Layers) -> None:
    with pytest.raises(CaseError) as error:
        apply_until(build_pipeline(context_of(trace(model))), "chunk")
    assert str(error.value) == (
        "CaseError: there is no pass chunk to stop after\n"
        "  expected: clean_up, concretize_symbols, measure_memory\n"
        "  found: until='chunk'\n"
        '  fix: name a pass of the list, or "" for none of them'
    )


@pytest.mark.parametrize("until", ["", "clean_up", "chunk", "concretize_symbols"])
def test_every_prefix_gives_a_graph_that_runs_and_computes_what_eager_does(model: Layers, until: str) -> None:
    joint = trace(model)
    context = context_of(joint, "layers.*")
    module, _ = run_pipeline(joint.module, apply_until(build_pipeline(context), until), context)
    chunks = "layers.*" if until in ("chunk", "concretize_symbols") else None
    assert differing(run_graph(module, joint, model, batch()), run_eager(model, batch(), chunks)) == []
