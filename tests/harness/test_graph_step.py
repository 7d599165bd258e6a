"""One program for all ranks, and as many collectives as the case's chunking asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases.chunking import moe_batch, moe_seq, transformer_batch, unchunked
from harness import graph_step
from harness.case import Case, Chunking
from harness.errors import UsageError
from harness.graph.options import GraphOptions
from harness.graph_step import GraphProgram, prepare
from reference.models import model_config

CPU = torch.device("cpu")
EARLY = replace(transformer_batch, chunking=Chunking(dim="batch", modules="layers.*", early_grad_accumulation=True))
NUM_LAYERS = model_config(unchunked.model).num_layers
NUM_MOE_LAYERS = NUM_LAYERS - model_config(unchunked.model).num_dense_layers


@pytest.fixture(scope="module")
def program() -> GraphProgram:
    return prepare(transformer_batch, CPU)


def collectives(program: GraphProgram) -> Counter[str]:
    targets = (str(node.target) for node in program.module.graph.nodes)
    return Counter(target.split(".")[1] for target in targets if target.startswith("_c10d_functional."))


def num_parameters(program: GraphProgram, *, below: str = "") -> int:
    return sum(below in name for name in program.parameter_names)


def test_preparing_twice_gives_the_same_code(program: GraphProgram) -> None:
    assert prepare(transformer_batch, CPU).code_hash == program.code_hash


def test_another_ranks_mesh_gives_the_same_code(program: GraphProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = graph_step.Mesh
    monkeypatch.setattr(graph_step, "Mesh", lambda rank, parallelism: mesh(5, parallelism))
    assert prepare(transformer_batch, CPU).code_hash == program.code_hash


def test_another_case_gives_another_code(program: GraphProgram) -> None:
    codes = {prepare(case, CPU).code_hash for case in (moe_batch, unchunked)}
    assert len(codes | {program.code_hash}) == 3


def test_the_step_reports_its_passes_and_seconds(program: GraphProgram) -> None:
    assert [report["name"] for report in program.passes] == ["clean_up", "chunk", "concretize_symbols"]
    assert list(program.seconds["passes"]) == ["clean_up", "chunk", "concretize_symbols"]
    assert program.seconds["trace"] > 0


def test_every_parameter_is_gathered_once_and_reduced_once_a_chunk_when_its_layer_is_chunked(
    program: GraphProgram,
) -> None:
    every, chunked = num_parameters(program), num_parameters(program, below="layers.")
    assert 0 < chunked < every
    counts = collectives(program)
    assert counts["all_gather_into_tensor"] == every
    assert counts["reduce_scatter_tensor"] == every + chunked


def test_early_accumulation_reduces_every_parameter_once() -> None:
    program = prepare(EARLY, CPU)
    counts = collectives(program)
    assert counts["all_gather_into_tensor"] == counts["reduce_scatter_tensor"] == num_parameters(program)


@pytest.mark.parametrize("case", [moe_batch, moe_seq], ids=lambda case: case.name)
def test_chunked_experts_reduce_their_own_parameters_twice_and_all_others_once(case: Case) -> None:
    program = prepare(case, CPU)
    every, chunked = num_parameters(program), num_parameters(program, below=".moe.")
    assert collectives(program)["reduce_scatter_tensor"] == every + chunked


def test_expert_all_to_alls_are_twice_those_of_the_unchunked_step(program: GraphProgram) -> None:
    once = collectives(prepare(unchunked, CPU))["all_to_all_single"]
    assert once == 5 * NUM_MOE_LAYERS, "counts, rows there and back; backward, back and there"
    assert collectives(program)["all_to_all_single"] == 2 * once


def pass_file(folder: Path) -> str:
    file = folder / "mine.py"
    file.write_text(
        "def drop_last(module):\n"
        "    for node in list(module.graph.nodes)[-2:-1]:\n"
        "        node.replace_all_uses_with(node.all_input_nodes[0])\n"
        "        module.graph.erase_node(node)\n"
    )
    return f"{file}:drop_last"


def test_an_extra_pass_changes_its_own_program_and_no_later_one(program: GraphProgram, tmp_path: Path) -> None:
    text = pass_file(tmp_path)
    changed = prepare(transformer_batch, CPU, GraphOptions(extra_passes=(text,)))
    assert changed.passes[-1]["name"] == "drop_last"
    assert len(changed.module.graph.nodes) == len(program.module.graph.nodes) - 1
    assert changed.code_hash != program.code_hash == prepare(transformer_batch, CPU).code_hash


def test_an_extra_pass_without_a_place_is_refused_with_the_cases_own_column(tmp_path: Path) -> None:
    options = GraphOptions(extra_passes=(f"{pass_file(tmp_path)}@before=chunk",))
    with pytest.raises(UsageError) as error:
        prepare(unchunked, CPU, options)
    assert str(error.value) == (
        "UsageError: there is no pass chunk for drop_last to stand before\n"
        "  expected: clean_up, concretize_symbols\n"
        "  found: @before=chunk"
    )


def test_graphs_are_written_only_where_a_folder_is_given(tmp_path: Path) -> None:
    code = prepare(unchunked, CPU, GraphOptions(dump_dir=tmp_path / "graphs")).code_hash
    assert (tmp_path / "graphs" / "02-concretize_symbols.diff").stat().st_size > 0
    assert prepare(unchunked, CPU).code_hash == code, "looking changes nothing"
