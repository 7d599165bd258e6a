"""One program for all ranks, and as many collectives as the case's chunking asks for."""

from __future__ import annotations

import functools
import gc
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Node

from bitproof.builtin_cases import CASES, chunking, models, overlap, process_groups, tp_chunked, tp_ep
from bitproof.harness.case import Batch, Case, Chunking, Parallelism, Pipeline
from bitproof.harness.errors import CaseError, ChunkError, UsageError
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.graph.backend.backends import Compiled
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.options import RunOptions
from bitproof.harness.systems import graph as graph_step
from bitproof.harness.systems.graph import prepare
from bitproof.harness.systems.graph_program import GraphProgram, code_hash, make_graph_system
from bitproof.reference.layers import attention
from bitproof.reference.models import model_config
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import Trainer, make_eager
from tests.ranks import on_ranks
from tests.small import small
from tests.traced import prepare_traced

CPU = torch.device("cpu")
COLUMN = ["clean_up", "chunk", "concretize_symbols", "measure_memory"]
transformer_batch = small(chunking.transformer_batch, layers=2)
moe_batch, moe_seq, unchunked = map(small, (chunking.moe_batch, chunking.moe_seq, chunking.unchunked))
llama3_fsdp4_tp2 = small(models.llama3_fsdp4_tp2)
tp_ep_whole, tp_ep_shared, tp_ep_distinct = map(small, (tp_ep.tp_ep_whole, tp_ep.tp_ep_shared, tp_ep.tp_ep_distinct))
isolate_shared, isolate_distinct = map(small, (process_groups.isolate_shared, process_groups.isolate_distinct))
EARLY = replace(unchunked, chunking=Chunking(dim="batch", modules="layers.*", early_grad_accumulation=True))
NUM_LAYERS = model_config(transformer_batch.model).num_layers
NUM_MOE_LAYERS = NUM_LAYERS - model_config(transformer_batch.model).num_dense_layers


@functools.cache
def prepared(case: Case) -> GraphProgram:
    """A case's program, made once for all tests that only read it."""
    return prepare_traced(case)


@pytest.fixture
def program() -> GraphProgram:
    return prepared(transformer_batch)


def test_a_program_shows_which_modules_a_step_runs_in_chunks_and_how_often(program: GraphProgram) -> None:
    assert program.chunked == {f"layers.{layer}": 1 for layer in range(NUM_LAYERS)}
    assert prepared(moe_batch).chunked == {"layers.0.moe": 1}
    assert prepared(unchunked).chunked is None
    until = replace(moe_batch, pipeline=Pipeline(until="clean_up"))
    assert prepare_traced(until).chunked is None


def collectives(program: GraphProgram) -> Counter[str]:
    targets = (str(node.target) for node in program.module.graph.nodes)
    return Counter(target.split(".")[1] for target in targets if target.startswith("_c10d_functional."))


def num_parameters(program: GraphProgram, *, below: str = "") -> int:
    return sum(below in name for name in program.parameter_names)


@functools.cache
def prepared_again() -> tuple[GraphProgram, list[int]]:
    """A program made once more, as rank 5, and the nodes of each graph whose code was generated meanwhile."""
    generated: list[int] = []
    mesh, python_code = graph_step.Mesh, torch.fx.Graph.python_code

    def noted(graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> Any:
        generated.append(len(graph.nodes))
        return python_code(graph, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_step, "Mesh", lambda rank, parallelism: mesh(5, parallelism))
        patch.setattr(torch.fx.Graph, "python_code", noted)
        return prepare(moe_batch, CPU), generated


def test_preparing_again_and_as_another_rank_gives_the_same_code() -> None:
    assert prepared_again()[0].code_hash == prepared(moe_batch).code_hash


def test_another_case_gives_another_code(program: GraphProgram) -> None:
    codes = {prepared(case).code_hash for case in (moe_batch, unchunked)}
    assert len(codes | {program.code_hash}) == 3


def test_another_nested_graph_gives_another_code() -> None:
    def calling(score: Callable[[Any], Any]) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        nested = graph.get_attr("score")
        graph.output(graph.call_function(map, (nested, graph.placeholder("x"))))
        return torch.fx.GraphModule({"score": torch.fx.symbolic_trace(score)}, graph)

    first, same, other = calling(lambda x: x * 2), calling(lambda x: x * 2), calling(lambda x: x * 3)
    assert first.code == same.code == other.code
    assert code_hash(first) == code_hash(same) != code_hash(other)


@pytest.mark.slow
def test_another_function_of_scores_gives_another_code(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(CASES["blocks_batch_flex"])
    first = prepared(case)
    monkeypatch.setattr(attention, "same_score", lambda score, b, h, q, kv: score * 2)
    other = prepare(case, CPU)
    assert other.module.code == first.module.code
    assert other.code_hash != first.code_hash


def test_the_step_reports_its_passes_and_seconds(program: GraphProgram) -> None:
    assert [report.name for report in program.passes] == COLUMN
    assert program.trace_seconds > 0


def test_code_is_generated_for_the_finished_graph_alone() -> None:
    finished, generated = prepared_again()
    assert generated == [len(finished.module.graph.nodes)]


def test_the_collector_rests_while_a_step_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*_: object, **__: object) -> None:
        raise RuntimeError(f"collecting: {gc.isenabled()}")

    monkeypatch.setattr(graph_step, "trace_joint_step", trace)
    with pytest.raises(RuntimeError, match=r"^collecting: False$"):
        prepare(moe_batch, CPU)


def test_a_backend_compiles_the_finished_graph_and_has_a_line_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []

    def compile_for(module, backend, group_sizes, regions):
        lines.append((backend, group_sizes, [node.target for node in module.graph.nodes]))
        return Compiled(lambda inputs: len(inputs), Path("none"), {"backend": backend, "nodes_compiled": 7})

    monkeypatch.setattr(graph_step, "compile_for", compile_for)
    program = prepare_traced(replace(unchunked, pipeline=Pipeline(backend="inductor")))
    [(backend, group_sizes, targets)] = lines
    assert (backend, group_sizes) == ("inductor", {"fsdp": 8, "efsdp": 4, "ep": 2, "tp": 1})
    assert targets == [node.target for node in program.module.graph.nodes]
    assert program.run(1, 2, 3) == 3
    assert program.passes[-1].name == "backend"
    assert program.passes[-1].facts == {"backend": "inductor", "nodes_compiled": 7}
    assert program.passes[-1].seconds > 0


def test_without_a_backend_the_graph_itself_runs(program: GraphProgram) -> None:
    assert program.run is program.module


def test_every_parameter_is_gathered_once_and_reduced_once_a_chunk_when_its_layer_is_chunked(
    program: GraphProgram,
) -> None:
    every, chunked = num_parameters(program), num_parameters(program, below="layers.")
    assert 0 < chunked < every
    counts = collectives(program)
    assert counts["all_gather_into_tensor"] == every
    assert counts["reduce_scatter_tensor"] == every + chunked


def test_early_accumulation_reduces_every_parameter_once() -> None:
    program = prepared(EARLY)
    counts = collectives(program)
    assert counts["all_gather_into_tensor"] == counts["reduce_scatter_tensor"] == num_parameters(program)


@pytest.mark.parametrize("case", [moe_batch, moe_seq], ids=lambda case: case.name)
def test_chunked_experts_reduce_their_own_parameters_twice_and_all_others_once(case: Case) -> None:
    program = prepared(case)
    every, chunked = num_parameters(program), num_parameters(program, below=".moe.")
    assert collectives(program)["reduce_scatter_tensor"] == every + chunked


def test_expert_all_to_alls_are_twice_those_of_the_unchunked_step(program: GraphProgram) -> None:
    once = collectives(prepared(unchunked))["all_to_all_single"]
    assert once == 5 * NUM_MOE_LAYERS, "counts, rows there and back; backward, back and there"
    assert collectives(program)["all_to_all_single"] == 2 * once


@pytest.fixture
def split_program() -> GraphProgram:
    return prepared(llama3_fsdp4_tp2)


def test_another_tensor_ranks_mesh_gives_the_same_code(
    split_program: GraphProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = graph_step.Mesh
    monkeypatch.setattr(graph_step, "Mesh", lambda rank, parallelism: mesh(5, parallelism))
    assert prepare(llama3_fsdp4_tp2, CPU).code_hash == split_program.code_hash


def test_of_a_single_sequence_that_stays_whole_the_other_dim_is_left_open() -> None:
    case = replace(llama3_fsdp4_tp2, batch=Batch(sequences=1, seq_len=5))
    assert graph_step.trace(case, CPU).joint.chunk_symbol.hint == 5


def test_each_split_layer_is_summed_once_forward_and_once_backward(split_program: GraphProgram) -> None:
    reduces = [n for n in split_program.module.graph.nodes if "all_reduce" in str(n.target)]
    num_split_layers = 2 * model_config(llama3_fsdp4_tp2.model).num_layers
    assert Counter(origin_of(n).direction for n in reduces) == dict.fromkeys(("forward", "backward"), num_split_layers)
    assert {n.args[1:] for n in reduces} == {("sum", "tp")}


def test_gradients_start_from_one_over_the_data_ranks(split_program: GraphProgram, program: GraphProgram) -> None:
    assert [seeds(p) for p in (split_program, program)] == [[1 / 4], [1 / 8]]


def seeds(program: GraphProgram) -> list[object]:
    return [n.args[1] for n in program.module.graph.nodes if str(n.target) == "aten.full_like.default"]


def lies_in(node: Node, modules: list[str]) -> bool:
    return (origin_of(node).module or "").startswith(tuple(modules))


@pytest.mark.parametrize("name", ["tp_chunked_batch", "tp_chunked_seq"])
def test_the_sums_of_a_tensor_group_run_once_a_chunk_in_chunk_order_as_the_experts_exchanges_do(name: str) -> None:
    case = small(CASES[name])
    program = prepared(case)
    whole = prepared(replace(case, reference="eager", chunking=None))
    chunked_layers = [f"layers.{i}.moe" for i in range(2)]
    if case.chunking == tp_chunked.BATCH:
        chunked_layers += [f"layers.{i}.attention" for i in range(2)]
    for operator, group in (("all_reduce", "tp"), ("all_to_all_single", "ep")):
        of_chunks, once = (
            [x for x in p.module.graph.nodes if operator in str(x.target) and lies_in(x, chunked_layers)]
            for p in (program, whole)
        )
        assert {x.args[-1] for x in of_chunks} == {group}
        assert len(of_chunks) == 2 * len(once) > 0
        for at in {origin_of(x)[:2] for x in of_chunks}:
            chunks = [x.meta["chunk"] for x in of_chunks if origin_of(x)[:2] == at]
            assert chunks == sorted(chunks) and set(chunks) == {0, 1}


def test_a_sequence_that_tensor_ranks_divide_cannot_be_cut_and_the_module_and_the_collective_are_named() -> None:
    case = small(CASES["tp_chunked_seq"])
    case = replace(case, parallelism=replace(case.parallelism, sequence=True))
    with pytest.raises(ChunkError) as error:
        prepared(case)
    what, expected, found, where, _fix = str(error.value).splitlines()
    called = r"all_gather_into_tensor `\w+` runs over them"
    assert re.fullmatch(rf"ChunkError: cannot chunk layers\.\d\.moe: ranks divide the chunked dim, and {called}", what)
    assert expected == "  expected: ranks that hold the chunked dim whole"
    assert found == f"  found: ['{case.batch.sequences}', '(u0//2)', '64'], where the dim has u0"
    assert ".moe (forward), reference/parallel/collectives.py" in where


def test_tensor_ranks_send_their_share_of_the_tokens_over_the_expert_group_and_sum_over_their_own() -> None:
    program = prepared(tp_ep_whole)
    plain = prepared(unchunked)
    assert groups_of(program, "all_to_all") == {"ep"} and groups_of(program, "all_reduce") == {"tp"}
    assert collectives(program)["all_to_all_single"] == collectives(plain)["all_to_all_single"]
    assert "layers.0.moe.tensor_coordinate" in program.buffer_names, "which share is a rank's own is no constant"
    two_layers, three_whole_parameters = 2 * 2, 3  # a sum each way; of wkv_a, kv_norm and the router
    assert collectives(program)["all_reduce"] == two_layers + three_whole_parameters


def test_all_to_alls_leave_the_object_that_they_share_with_tensor_parallel_sums() -> None:
    shared, distinct = (prepared(case) for case in (tp_ep_shared, tp_ep_distinct))
    assert groups_of(shared, "all_to_all") == {"ep.expert_only"} and groups_of(shared, "all_reduce") == {"tp"}
    assert shared.groups["ep.expert_only"].partition == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups_of(distinct, "all_to_all") == {"ep"} and not distinct.groups
    assert shared.module.code.replace("ep.expert_only", "ep") == distinct.module.code


def groups_of(program: GraphProgram, operator: str) -> set[str]:
    nodes = (node for node in program.module.graph.nodes if operator in str(node.target))
    return {str(node.args[-1]) for node in nodes}


def test_a_bucketed_step_gathers_and_reduces_each_block_once() -> None:
    program = prepared(small(CASES["blocks_batch_bucketed"]))
    block, its_experts, outside_blocks = 1, 1, 3  # embedding, last norm, output
    counts = collectives(program)
    assert counts["all_gather_into_tensor"] == block + its_experts + outside_blocks
    assert counts["reduce_scatter_tensor"] == block + its_experts + outside_blocks
    assert groups_of(program, "all_gather") == {"fsdp", "efsdp"}
    assert groups_of(program, "reduce_scatter") == set(program.groups) == {"fsdp.reduce", "efsdp.reduce"}
    assert [group.partition for group in program.groups.values()] == [
        (tuple(range(8)),),
        ((0, 2, 4, 6), (1, 3, 5, 7)),
    ]


@pytest.mark.slow
def test_a_shared_group_gives_up_its_all_to_alls_and_distinct_ones_keep_theirs() -> None:
    shared, distinct = (prepared(case) for case in (isolate_shared, isolate_distinct))
    assert groups_of(shared, "all_to_all") == {"ep.expert_only"}
    assert shared.groups["ep.expert_only"].high_priority
    assert groups_of(distinct, "all_to_all") == {"ep"}
    assert not distinct.groups
    assert shared.module.code.replace("ep.expert_only", "ep") == distinct.module.code


def observed(trainer: Trainer) -> dict[str, bytes]:
    """The bytes of everything observed in two steps."""
    seen: dict[str, bytes] = {}
    for index in (0, 1):
        trainer.step(index, lambda kind, name, x: seen.update({f"{index} {kind} {name}": x.numpy().tobytes()}))
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        replace(llama3_fsdp4_tp2, parallelism=Parallelism(world_size=2, ep=1, tp=2)),
        replace(tp_ep_shared, parallelism=Parallelism(world_size=2, ep=2, tp=2, shared_groups=True)),
        replace(small(CASES["captured_experts_seq"]), parallelism=Parallelism(world_size=2, ep=2)),
        pytest.param(
            replace(small(CASES["experts_seq_float32"]), parallelism=Parallelism(world_size=2)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda case: case.name,
)
def test_the_graph_has_eagers_bits(case: Case, tmp_path: Path) -> None:
    assert_eagers_bits(case, lambda: prepare(case, CPU), tmp_path)


def assert_eagers_bits(case: Case, prepared: Callable[[], GraphProgram], folder: Path) -> None:
    """Hold a case's program against eager, in two steps on the case's ranks.

    On a build of torch for CUDA no rank can run backward that is forked from a process that has traced, as this one
    has; there processes of the case's own do.
    """
    if torch.version.cuda is not None:
        [result] = run_cases([replace(case, steps=2)], RunOptions(device="cpu", control="never"), folder)
        assert (result.verdict, result.error) == ("EQUAL", None) and sum(result.compared.values()) > 200
        return
    program = prepared()

    def body(mesh: Mesh) -> list[Any]:
        eager = observed(make_eager(case, mesh, CPU, case.chunking is not None, lambda gradients: gradients))
        graph = observed(make_graph_system(case, mesh, CPU, program, lambda gradients: gradients))
        return [len(eager), [name for name in eager.keys() | graph.keys() if eager.get(name) != graph.get(name)]]

    for count, differing in on_ranks(case.parallelism, body):
        assert count > 100
        assert differing == []


OVERLAPPED = [
    pytest.param(small(case), id=case.name, marks=[] if case.name == "experts_seq_overlap" else pytest.mark.slow)
    for case in overlap.CASES
]


@pytest.mark.parametrize("case", OVERLAPPED)
def test_an_overlapped_step_runs_the_same_nodes_and_hides_most_of_its_all_to_alls(case: Case) -> None:
    chunked = prepared(replace(case, pipeline=Pipeline()))
    program = prepared(case)
    assert program.code_hash != chunked.code_hash
    assert sorted(map(described, program.module.graph.nodes)) == sorted(map(described, chunked.module.graph.nodes))
    facts = next(report.facts for report in program.passes if report.name == "overlap")
    assert facts["all_to_alls"] == collectives(program)["all_to_all_single"]
    assert facts["after"]["step_seconds"] < facts["before"]["step_seconds"]
    for direction in ("forward", "backward"):
        before, after = facts["before"][direction], facts["after"][direction]
        assert before["all_to_all_seconds"] == after["all_to_all_seconds"] > 0
        assert before["hidden_fraction"] == 0 < 0.5 < after["hidden_fraction"] <= 1


def described(node: Node) -> str:
    return f"{node.name} {node.target} {node.args} {node.kwargs}"


UNTRACED: Any = SimpleNamespace(joint=SimpleNamespace(chunk_symbol=None, guards=(), module_calls={}), system="graph")
"""What is known of a step whose column is wrong."""


def pass_file(folder: Path) -> str:
    file = folder / "mine.py"
    file.write_text(
        "def drop_last(module):\n"
        "    for node in list(module.graph.nodes)[-2:-1]:\n"
        "        node.replace_all_uses_with(node.all_input_nodes[0])\n"
        "        module.graph.erase_node(node)\n"
    )
    return f"{file}:drop_last"


def test_an_extra_pass_changes_its_own_program(tmp_path: Path) -> None:
    text, program = pass_file(tmp_path), prepared(moe_batch)
    changed = prepare_traced(moe_batch, GraphOptions(extra_passes=(text,)))
    assert changed.passes[-2].name == "drop_last"
    assert len(changed.module.graph.nodes) == len(program.module.graph.nodes) - 1
    assert changed.code_hash != program.code_hash


def test_an_extra_pass_without_a_place_is_refused_with_the_cases_own_column(tmp_path: Path) -> None:
    options = GraphOptions(extra_passes=(f"{pass_file(tmp_path)}@before=chunk",))
    with pytest.raises(UsageError) as error:
        graph_step.finish(UNTRACED, unchunked, CPU, options)
    assert str(error.value) == (
        "UsageError: there is no pass chunk for drop_last to stand before\n"
        "  expected: clean_up, concretize_symbols, measure_memory\n"
        "  found: @before=chunk"
    )


def test_graphs_are_written_only_where_a_folder_is_given(tmp_path: Path) -> None:
    code = prepare_traced(unchunked, GraphOptions(dump_dir=tmp_path / "graphs")).code_hash
    assert (tmp_path / "graphs" / "02-concretize_symbols.diff").stat().st_size > 0
    assert prepared(unchunked).code_hash == code, "looking changes nothing"


def test_a_case_that_stops_after_an_extra_pass_has_neither_later_passes_nor_a_backend() -> None:
    text = "cases/examples/extra_passes.py:wait_late@before=chunk"
    case = replace(moe_batch, pipeline=Pipeline(backend="inductor", until="wait_late"))
    program = prepare_traced(case, GraphOptions(extra_passes=(text,)))
    assert [report.name for report in program.passes] == ["clean_up", "wait_late"]
    assert program.run is program.module


def test_a_pass_to_stop_after_must_be_in_the_column() -> None:
    with pytest.raises(CaseError) as error:
        graph_step.finish(UNTRACED, replace(moe_batch, pipeline=Pipeline(until="bucket")), CPU)
    assert str(error.value).startswith(
        "CaseError: there is no pass bucket to stop after\n  expected: clean_up, chunk, "
    )
