"""A step divided into its stages' graphs, each pass run on each of them, and put together again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Chunking, Memory, Schedule
from bitproof.harness.errors import ChunkError, PassError
from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.halves import half_of
from bitproof.harness.graph.origin import RECOMPUTED_KEY, origin_of
from bitproof.harness.graph.passes.chunk import chunk
from bitproof.harness.graph.pipeline import build_pipeline, run_pipeline
from bitproof.harness.graph.staged.cut_graph import cut
from bitproof.harness.graph.staged.cuts import STAGE_KEY, Cuts
from bitproof.harness.graph.staged.stage_graphs import StageGraphs
from bitproof.harness.graph.writer import CHUNK_KEY
from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    Sketch,
    batch,
    context_of,
    copied,
    parameter,
    run_eager,
    trace,
)
from tests.harness.graph.staged.stages import bits, layer, run
from tests.traced import prepare_traced

aten = torch.ops.aten


def calls_of(module):
    return [node for node in module.graph.nodes if node.op == "call_function"]


def divided(model, num_stages):
    joint = trace(model)
    return joint, StageGraphs.of(joint.module, Cuts(num_stages, len(model.layers)), joint.chunk_symbol)


def rewritten(joint, num_layers, num_stages=2, modules=None, passes=None, **settings):
    context = replace(context_of(joint, modules), cuts=Cuts(num_stages, num_layers), **settings)
    module, reports = run_pipeline(joint.module, passes or build_pipeline(context), context)
    return cut(module, context.cuts, joint.chunk_symbol), reports


def test_a_stages_graph_is_a_joint_graph_with_its_own_parameters_first_and_what_it_is_sent_last():
    _, stages = divided(Layers(layer(), layer(), layer()), 3)
    parameters = [graph.parameters for graph in stages.graphs]
    assert [len(own) for own in parameters] == [2, 2, 2] and len({name for own in parameters for name in own}) == 6
    assert [(len(graph.received), len(graph.sent)) for graph in stages.graphs] == [(1, 1), (2, 2), (1, 1)]
    for graph in stages.graphs:
        inputs = [node.name for node in graph.module.graph.find_nodes(op="placeholder")]
        [loss, *gradients, sent] = graph.module.graph.output_node().args[0]
        assert inputs[:2] == list(graph.parameters) and inputs[len(inputs) - len(graph.received) :] == list(
            graph.received
        )
        assert (loss is None) == (graph is not stages.graphs[-1])
        assert len(gradients) == 2 and [node.name for node in sent] == list(graph.sent)
        halves = [half_of(node) for node in calls_of(graph.module)]
        assert halves == sorted(halves, reverse=True) and len(set(halves)) == 2


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_put_together_compute_what_the_graph_did(num_stages):
    model = Layers(*(layer() for _ in range(4)))
    joint, stages = divided(model, num_stages)
    module = stages.joined()
    assert (module is joint.module) == (num_stages == 1)
    parts = cut(module, Cuts(num_stages, 4), joint.chunk_symbol)
    whole = cut(joint.module, Cuts(1, 4), joint.chunk_symbol)
    schedule = Schedule(micro_batches=4, order="gpipe")
    assert bits(run(joint, parts, model, schedule, num_stages)) == bits(run(joint, whole, model, schedule, 1))


@pytest.mark.parametrize("policy", ["none", "selective", "full", "offload"])
@pytest.mark.parametrize("modules", [None, "layers.*", "layers.3"])
def test_passes_on_each_stage_keep_the_bits_of_eager(policy, modules):
    model = Layers(*(layer() for _ in range(4)))
    joint = trace(model)
    parts, _ = rewritten(joint, 4, modules=modules, memory=Memory(policy=policy))
    losses, gradients, _ = run(joint, parts, model, Schedule(micro_batches=2), 2)
    wanted = [run_eager(model, batch(seed=index), modules) for index in range(2)]
    assert bits([losses]) == bits([[step["loss"] for step in wanted]])
    sums = [wanted[0][f"grad {name}"] + wanted[1][f"grad {name}"] for name in joint.parameter_names]
    assert bits([gradients]) == bits([sums])


def test_a_stage_is_not_asked_to_save_an_operator_that_only_another_stage_calls():
    model = Layers(layer(), Applied(lambda m, x: (x @ m.w).cumsum(-1), w=parameter(D, D)))
    joint = trace(model)
    memory = Memory(policy="selective", save=("mm/2", "cumsum"))
    parts, _ = rewritten(joint, 2, memory=memory)
    stages = StageGraphs.of(joint.module, Cuts(2, 2), joint.chunk_symbol)
    context = replace(context_of(joint, None), memory=memory)
    saved = [stages.context_of(graph, context).memory.save for graph in stages.graphs]
    assert saved == [("mm/2",), ("mm/2", "cumsum")]
    losses, _, _ = run(joint, parts, model, Schedule(micro_batches=2), 2)
    assert bits([losses]) == bits([[run_eager(model, batch(seed=index), None)["loss"] for index in range(2)]])


def test_an_operator_that_no_stage_calls_is_refused_in_stages_too():
    memory = Memory(policy="selective", save=("mm", "cumsum"))
    with pytest.raises(PassError, match="no block calls in forward: cumsum"):
        rewritten(trace(Layers(layer(), layer())), 2, memory=memory)


def test_in_chunks_a_whole_activation_crosses_and_forward_ends_before_backward_begins():
    parts, _ = rewritten(trace(Layers(layer(), layer())), 2, modules="layers.*", memory=Memory(policy="full"))
    assert [len(part.sent) for part in parts.by_place.values()] == [1, 0, 0, 1]
    for part in parts.by_place.values():
        assert {x.meta.get(CHUNK_KEY) for x in calls_of(part.module)} >= {0, 1}
    forward = calls_of(parts.by_place[0, "forward"].module)
    assert forward[-1].target is aten.cat.default and forward[-1].name == parts.by_place[0, "forward"].sent[0]
    assert all(origin_of(x).direction == "forward" for x in forward)


def test_what_backward_is_first_to_cut_is_cut_in_backward():
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, D)
    read_late = sketch.call(aten.cos.default, x, at="embedding")
    inner = sketch.call(aten.sin.default, sketch.call(aten.neg.default, x, at="embedding"), at="layers.0")
    last = sketch.call(aten.mul.Tensor, read_late, inner, at="layers.0", backward=True)
    sketch.graph.output([None, (inner, last)])
    module = GraphModule({}, sketch.graph)
    for node in calls_of(module):
        node.meta["half"] = origin_of(node).direction
    cuts = [x for x in calls_of(chunk(module, sketch.context("layers.*"))) if x.name.startswith("cos_slice")]
    assert [half_of(node) for node in cuts] == ["backward", "backward"]


def test_a_stage_without_a_chosen_module_stays_whole_and_a_pattern_that_no_stage_matches_is_refused():
    joint = trace(Layers(layer(), layer()))
    parts, reports = rewritten(joint, 2, modules="layers.1")
    chunked = [any(CHUNK_KEY in x.meta for x in part.module.graph.nodes) for part in parts.by_place.values()]
    assert chunked == [False, False, True, True]
    [report] = [report for report in reports if report.name == "chunk"]
    assert [facts.get("calls") for facts in report.by_stage] == [None, {"layers.1": 1}]
    with pytest.raises(ChunkError, match="matches no module of the graph") as error:
        rewritten(trace(Layers(layer(), layer())), 2, modules="blocks.*")
    assert error.value.where == "pass chunk"


def test_modules_that_a_case_names_alone_are_looked_for_in_the_stages_that_have_them():
    joint = trace(Layers(layer(), layer()))
    chunking = Chunking(dim="batch", modules="layers.*", only=("layers.0", "layers.1"))
    context = replace(context_of(joint, "layers.*"), chunking=chunking, cuts=Cuts(2, 2))
    _, reports = run_pipeline(copied(joint).module, build_pipeline(context), context)
    assert [facts["modules"] for r in reports if r.name == "chunk" for facts in r.by_stage] == [
        ["layers.0"],
        ["layers.1"],
    ]
    strange = replace(context, chunking=replace(chunking, only=("layers.0", "layers.7")))
    with pytest.raises(ChunkError, match=r"layers\.7 cannot be chunked"):
        run_pipeline(joint.module, build_pipeline(strange), strange)


def test_a_pass_sees_one_stage_after_the_other_and_its_report_has_all():
    seen = []

    def count(module, context):
        context.facts["inputs"] = len(module.graph.find_nodes(op="placeholder"))
        seen.append(module)
        return module

    joint = trace(Layers(layer(), layer()))
    num_calls = len(calls_of(joint.module))
    _, [report] = rewritten(joint, 2, passes=[count])
    assert len(seen) == 2 and [facts["inputs"] for facts in report.by_stage] == [5, 5]
    assert (report.nodes_before, report.changed) == (sum(len(x.graph.nodes) for x in seen), {})
    assert num_calls <= sum(len(calls_of(x)) for x in seen)


def test_a_value_that_a_pass_moves_behind_the_message_that_needs_it_is_refused():
    def late(module, context):
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.meta["half"] = "backward"
        return module

    with pytest.raises(PassError, match=r"stage 1 is sent `add\w*` before a stage has computed it"):
        rewritten(trace(Layers(layer(), layer())), 2, passes=[late])


def test_a_pass_that_moves_a_call_to_the_other_half_is_blamed_for_it():
    def early(module, context):
        calls = calls_of(module)
        first = next(
            x for x in calls if half_of(x) == "backward" and all(y.op == "placeholder" for y in x.all_input_nodes)
        )
        calls[0].prepend(first)
        return module

    with pytest.raises(PassError, match="is in the forward half, behind a call of backward") as error:
        rewritten(trace(Layers(layer(), layer())), 2, passes=[early])
    assert error.value.where.endswith("pass early")


# -- what each pass makes, in the stages of whole cases ---------------------------------------------


def found_in(case):
    """What each half of each stage of a case's finished graph has, by what made it."""
    parts = prepare_traced(case).parts
    found = {}
    for place, part in parts.by_place.items():
        count = found[place] = Counter()
        flying = set()
        for node in calls_of(part.module):
            assert node.meta[STAGE_KEY] == place[0]
            name = operators.operator_name(node)
            count["again"] += bool(node.meta.get(RECOMPUTED_KEY))
            count[f"chunk {node.meta.get(CHUNK_KEY)}"] += 1
            count["copies"] += name in ("offload", "reload")
            if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
                count[f"{name} of {origin_of(node).module}"] += 1
            if operators.is_collective(node) and name == "all_to_all_single":
                flying.add(node)
            elif operators.is_wait(node):
                flying.discard(operators.launch_of(node))
            elif flying and name in ("mm", "bmm", "_grouped_mm"):
                count["hidden products"] += 1
    return found


@pytest.mark.parametrize("name", ["pipeline_chunked_unstaged", "pipeline_interleaved_chunked"])
def test_every_stage_has_what_each_pass_makes_and_no_more_than_it_would_alone(name):
    case = CASES[name]
    found = found_in(case)
    assert len(found) == 2 * case.stages
    for (stage, half), count in found.items():
        assert count["chunk 0"] == count["chunk 1"] > 0
        assert (count["again"] > 0) == (half == "backward"), "recomputed where backward needs it, in its own stage"
        assert (count["copies"] > 0) == (case.memory.policy == "offload")
        has_experts = stage > 0 or case.stages == 2
        assert (count["hidden products"] > 0) == has_experts, (stage, half)
        gathers = {key: n for key, n in count.items() if key.startswith(("all_gather", "reduce"))}
        assert gathers and max(gathers.values()) <= 2, "one bucket of a block, and one of its experts"
        layers = {key.rsplit("layers.")[-1] for key in gathers if "layers." in key}
        assert layers <= {str(x) for x in range(4) if x * case.stages // 4 == stage}


def test_buckets_of_full_recomputation_are_gathered_again_in_their_own_stage():
    found = found_in(CASES["pipeline_recomputed"])
    for (stage, half), count in found.items():
        gathered = {key for key in count if key.startswith("all_gather")}
        assert {f"all_gather_into_tensor of layers.{2 * stage + i}" for i in (0, 1)} <= gathered, half
