from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bitproof import builtin_cases as cases
from bitproof.builtin_cases import (
    attention,
    autoplace,
    backends,
    captured,
    chunking,
    debug,
    folded,
    joint,
    loss_pieces,
    models,
    pipelines,
    published,
    regional,
    shapes,
    tp_chunked,
    tp_ep,
    unequal,
)
from bitproof.builtin_cases.layouts import context_parallel, optimizers, two_layouts
from bitproof.builtin_cases.passes import bucketing, process_groups
from bitproof.harness.case import Case, Model, Parallelism, Pipeline, pattern_of
from bitproof.harness.case.select import select
from bitproof.harness.case.traced import OPTIONAL_PASSES
from bitproof.harness.errors import CaseError, UsageError
from bitproof.reference.data import TextStream, text_source
from bitproof.reference.init import initial_values, spread_biases
from bitproof.reference.models import build_model, model_config
from tests.distributions import install


def test_make_run_takes_the_six_cases_that_ci_judges():
    root = Path(__file__).parents[2]
    asked = dict(re.findall(r"^(CASES|SIGHT) := (.+)$", (root / "Makefile").read_text(), re.MULTILINE))
    chosen = {case.name for case in select(cases.all_cases(), f"{asked['CASES']} or {asked['SIGHT']}")}
    judged = re.findall(r"^(?:NAMES|SIGHT) = \{(.+)\}$", (root / ".ci/check_report.py").read_text(), re.MULTILINE)
    assert chosen == set(re.findall(r"\w+", " ".join(judged))) and len(chosen) == 6


def test_cases_are_listed_by_family_and_the_main_ones_come_first():
    names = [case.name for case in cases.all_cases()]
    assert names[:4] == ["transformer_batch", "moe_batch", "moe_seq", "unchunked"]
    assert names[4:7] == ["blocks_batch_sight", "experts_batch_sight", "experts_seq_sight"]
    assert names == [case.name for family in cases.FAMILIES for case in family.CASES]
    for family in cases.FAMILIES:
        assert {case.family for case in family.CASES} == {family.__name__.rpartition(".")[2]}
    assert all(cases.CASES[case.name] is case for case in cases.all_cases())


def test_two_cases_of_one_name_are_refused():
    twin = Case(name="moe_seq", family="other", reference="eager")
    with pytest.raises(CaseError) as error:
        cases.collect(chunking.CASES, [twin])
    assert str(error.value) == (
        "CaseError: two cases are named moe_seq\n"
        "  expected: a name of its own for every case\n"
        "  found: one in family chunking, one in family other"
    )


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in which a distribution named mine brings cases from its module `more_cases`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "more_cases", raising=False)
    install(tmp_path, "mine", "[bitproof.cases]\nmore = more_cases:CASES\n")
    yield tmp_path
    sys.modules.pop("more_cases", None)


CASE = (
    "from bitproof.harness.case import Case\ndef case(name): return Case(name=name, family='more', reference='eager')\n"
)


@pytest.mark.parametrize("declared", ["CASES = [case('mine')]", "def CASES(): return (case('mine'),)"])
def test_cases_of_installed_distributions_come_last(site, declared):
    (site / "more_cases.py").write_text(CASE + declared)
    assert [case.name for case in cases.all_cases()] == [*cases.CASES, "mine"]
    assert "mine" not in cases.CASES


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ("CASES = [case('moe_seq')]", "CaseError: two cases are named moe_seq\n"),
        ("CASES = [case('MINE')]", "UsageError: entry point more of mine 1.0 cannot be loaded\n  found: CaseError"),
        ("CASES = ['mine']", "UsageError: entry point more of mine 1.0 is not a list of cases\n"),
        ("CASES = case('mine')", "UsageError: entry point more of mine 1.0 is not a list of cases\n"),
        ("import no_such_module", "UsageError: entry point more of mine 1.0 cannot be loaded\n"),
    ],
)
def test_a_distribution_that_brings_no_cases_or_a_name_again_is_refused(site, declared, text):
    (site / "more_cases.py").write_text(CASE + declared)
    with pytest.raises(UsageError) as error:
        cases.all_cases()
    assert str(error.value).startswith(text)


def test_the_main_cases_run_20_steps_on_8_ranks_in_pairs_of_experts():
    for case in chunking.PLAIN:
        assert (case.steps, case.parallelism.world_size, case.parallelism.ep) == (20, 8, 2)
        assert (case.expected, case.candidate) == ("EQUAL", "graph")
    assert [(case.chunking.dim, case.chunking.modules) for case in chunking.PLAIN[:3]] == [
        ("batch", "layers.*"),
        ("batch", "layers.*.moe"),
        ("seq", "layers.*.moe"),
    ]
    assert (chunking.unchunked.reference, chunking.unchunked.chunking) == ("eager", None)


def test_each_chunking_has_a_main_case_in_float32_that_is_made_to_see():
    seen = [case for case in chunking.CASES if case.name.endswith("_sight")]
    assert [case.chunking for case in seen] == [case.chunking for case in chunking.PLAIN[:3]]
    assert {case.parallelism.ep for case in seen} == {2, 3}
    for case in seen:
        assert (case.steps, case.precision.compute, case.batch.data) == (2, "float32", "adversarial")
        assert case.parallelism.world_size == 6, "no power of two"
        assert model_config(case.model).moe.routing.top_k >= 3


def test_of_the_experts_of_a_case_that_sees_one_gets_no_token_one_a_single_one_and_one_more_than_256():
    case = chunking.blocks_batch_sight
    model = build_model(case.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_values(name, parameter.shape, case.seed, spread=True))
        spread_biases(model, case.seed)
        step = TextStream(text_source(case.batch.data)[0], case.batch, rank=1, world_size=6).step(0)
        loss_like = model(step.tokens_BS, step.positions_BS)
    counts = model.get_buffer("layers.1.moe.tokens_per_expert")
    assert loss_like.isfinite().all()
    assert counts[1] == 0 and counts[-1] == 1 and counts.max() > 256 and counts.sum() == 3 * 1024


def test_flex_cases_are_their_plain_namesakes_with_documents_a_line_long():
    for case, plain in zip(
        attention.CASES, (chunking.transformer_batch, chunking.moe_seq, chunking.unchunked), strict=True
    ):
        assert (case.model.attention, case.batch.data, case.steps) == ("flex", "pydoc_lines", 5)
        assert (case.chunking, case.reference, case.expected) == (plain.chunking, plain.reference, "EQUAL")


def test_folded_cases_are_the_plain_ones_with_all_tokens_in_one_dim():
    *plain, tp, overlap = folded.CASES
    for case, base in zip(plain, chunking.PLAIN, strict=True):
        assert (case.model.folded, case.batch.data, case.steps) == (True, "pydoc_lines", 5)
        assert (case.chunking, case.reference, case.expected) == (base.chunking, base.reference, "EQUAL")
    blocks, _, seq, _ = plain
    assert (seq.input_shape, seq.batch.seq_len) == ((96,), 32), "chunk 1 begins with token 48, inside a sequence"
    assert tp == replace(blocks, name="folded_tp", steps=2, parallelism=Parallelism(tp=2, ep=4))
    assert overlap == replace(blocks, name="folded_overlap", steps=2, pipeline=Pipeline(bucket=True, overlap=True))


def test_cases_with_the_loss_in_pieces_differ_from_the_plain_ones_in_that():
    *plain, over_folded, nightly, sp, precompiled_step = loss_pieces.CASES
    for case, base in zip(plain, chunking.PLAIN, strict=True):
        model = Model(loss_pieces=8 if base is chunking.moe_seq else 4)
        assert case == replace(base, name=case.name, family="loss_pieces", steps=5, model=model)
    blocks = plain[0]
    assert over_folded.model == replace(folded.blocks_batch_folded.model, loss_pieces=16)
    assert all(getattr(nightly.pipeline, name) for name in OPTIONAL_PASSES) and nightly.memory.policy == "offload"
    assert sp == replace(blocks, name="pieces_sp", steps=2, parallelism=Parallelism(tp=2, ep=4, sequence=True))
    assert precompiled_step == replace(blocks, name="pieces_precompiled", candidate="precompiled", steps=2)


def test_cases_that_must_differ_say_in_what():
    for case in unequal.CASES:
        assert (case.expected, case.differs) == ("DIFFERENT", ("grad", "param", "optimizer"))
        assert (case.steps, case.reference) == (2, "eager_chunked")
    assert unequal.early_accumulation.chunking.early_grad_accumulation
    assert unequal.chunked_vs_unchunked.candidate == "eager"


def test_other_models_run_5_steps_on_8_ranks_and_must_be_equal():
    for case in models.CASES:
        assert (case.steps, case.parallelism.world_size, case.expected) == (5, 8, "EQUAL")
    assert {case.model.family for case in models.CASES} == {"qwen3_moe", "llama3"}


def test_optimizers_are_held_against_the_plain_one_of_their_kind():
    for case in optimizers.CASES:
        loop, _, kind = case.reference.rpartition(":")
        assert case.candidate.startswith(f"{loop}:{kind}_") and case.name == case.candidate.rpartition(":")[2]
    assert {case.name for case in optimizers.CASES if case.expected != "EQUAL"} == {"adamw_fused", "muon_fsdp_tp"}
    assert [case.name for case in optimizers.CASES if case.reference_parallelism] == ["muon_fsdp", "muon_fsdp_tp"]
    assert optimizers.muon_fsdp_tp.parallelism.tp == 2


def test_tensor_parallel_cases_split_eight_ranks_as_their_names_say():
    for case, data_ranks, tp in ((models.llama3_fsdp4_tp2, 4, 2), (models.llama3_fsdp2_tp4, 2, 4)):
        assert (case.parallelism.data_ranks, case.parallelism.tp) == (data_ranks, tp)
        assert (case.reference, case.candidate, case.chunking) == ("eager", "graph", None)


def test_both_parallelisms_are_tried_with_groups_of_their_own_and_with_shared_ones():
    whole, nightly, shared, distinct = tp_ep.CASES
    for case in tp_ep.CASES:
        assert (case.reference, case.candidate, case.expected, case.chunking) == ("eager", "graph", "EQUAL", None)
        assert (case.parallelism.world_size, case.parallelism.data_ranks, case.parallelism.tp) == (8, 4, 2)
        assert case.model.family == "deepseek_v3" and "tp_ep" in case.name
        assert case.grad_norm, "the one number in which all ranks' gradients meet"
    assert (whole.steps, whole.parallelism.ep) == (5, 4)
    every_pass = Pipeline(isolate_groups=True, isolate_gathers=True, bucket=True)
    assert nightly == replace(whole, name="tp_ep_nightly", steps=2, memory=nightly.memory, pipeline=every_pass)
    assert nightly.memory.policy == "offload"
    assert shared.pipeline.isolate_groups and shared.parallelism == Parallelism(tp=2, ep=2, shared_groups=True)
    assert distinct == replace(shared, name="tp_ep_distinct", parallelism=Parallelism(tp=2, ep=2))


def test_chunks_under_tensor_parallelism_differ_from_the_cases_that_are_whole_in_their_chunks_alone():
    batch, moe, seq, nightly, shared, llama3, *others = tp_chunked.CASES
    in_chunks = replace(tp_ep.tp_ep_whole, reference="eager_chunked", chunking=tp_chunked.BATCH)
    assert batch == replace(in_chunks, name="tp_chunked_batch", family="tp_chunked", steps=20)
    assert [case.chunking.dim for case in tp_chunked.CASES if case.chunking.dim != "batch"] == [seq.chunking.dim]
    assert moe.chunking.modules == seq.chunking.modules == "layers.*.moe"
    assert (nightly.pipeline, nightly.memory) == (tp_ep.tp_ep_nightly.pipeline, tp_ep.tp_ep_nightly.memory)
    in_chunks = replace(tp_ep.tp_ep_shared, reference="eager_chunked", chunking=tp_chunked.BATCH)
    assert shared == replace(in_chunks, name="tp_chunked_shared", family="tp_chunked")
    assert llama3.parallelism == Parallelism(tp=4) and llama3.model.family == "llama3"
    divided, divided_moe, divided_llama3, overlap, divided_nightly = others
    for case, other in ((divided, batch), (divided_moe, moe), (divided_llama3, llama3), (divided_nightly, overlap)):
        parallelism = replace(other.parallelism, sequence=True)
        assert case == replace(other, name=case.name, steps=case.steps, parallelism=parallelism)
    assert overlap == replace(nightly, name=overlap.name, pipeline=replace(nightly.pipeline, overlap=True))


def test_captured_cases_have_no_size_that_data_decide_and_differ_from_others_in_that_and_in_what_runs_them():
    llama3, nightly, blocks, batch, seq, experts, tp = captured.CASES
    runs = Pipeline(backend="cuda_graph")
    assert (
        replace(llama3, name="blocks_batch_llama3", family="models", pipeline=Pipeline()) == models.blocks_batch_llama3
    )
    assert nightly.pipeline == tp.pipeline == replace(runs, isolate_gathers=True, bucket=True)
    assert experts.pipeline == runs and experts.model == tp.model and experts.model.capacity == 1.25
    for case in captured.CASES:
        assert case.pipeline.captures and not case.pipeline.compiles and not case.observe
        assert (case.model.family == "llama3") == (case.model.capacity is None)
    for case, other in ((blocks, "transformer_batch"), (batch, "moe_batch"), (seq, "moe_seq")):
        of_main = getattr(chunking, other)
        assert case == replace(
            of_main, name=case.name, family="captured", steps=2, model=experts.model, pipeline=experts.pipeline
        )
    assert not Pipeline(backend="cuda_graph", until="chunk").captures
    with pytest.raises(CaseError, match="observes activations of a step that is replayed as a CUDA graph"):
        replace(llama3, observe=("layers.*",))
    with pytest.raises(CaseError, match="llama3 has no experts, and so no capacity"):
        model_config(replace(llama3.model, capacity=1.0))
    for capacity in (0, 0.0, -1.0, float("nan"), 1e9, True):
        with pytest.raises(CaseError, match=r"model\.capacity is out of range"):
            replace(experts.model, capacity=capacity)
    assert model_config(experts.model).moe.capacity == 1.25


def test_pipelines_are_held_against_eager_stages_and_against_none_on_four_and_eight_ranks():
    ours = [case for case in pipelines.CASES if case.schedule]
    gpipe, one, unstaged, interleaved, chunked, recomputed, *of_passes, tensor, llama3 = ours[:-4]
    tied, tied_unstaged, shared, shared_unstaged = ours[-4:]
    assert (recomputed.memory.policy, recomputed.pipeline.bucket, recomputed.reference) == ("full", True, "eager")
    for case, policy, layout in zip(of_passes, ("offload", "full"), (one, interleaved), strict=True):
        assert (case.chunking, case.pipeline, case.memory.policy) == (chunked.chunking, chunked.pipeline, policy)
        assert case.reference == "bitproof.reference.unstaged:eager_chunked"
        assert (case.parallelism, case.schedule) == (layout.parallelism, layout.schedule)
    assert gpipe == replace(one, name="pipeline_gpipe", schedule=replace(one.schedule, order="gpipe"))
    assert (one.reference, one.stages, one.parallelism.stage_ranks, one.parallelism.ep) == ("eager", 2, 2, 2)
    assert unstaged == replace(one, name="pipeline_unstaged", reference="bitproof.reference.unstaged:eager")
    assert (interleaved.stages, interleaved.parallelism.world_size, interleaved.model.layers) == (4, 8, 4)
    assert chunked.pipeline == Pipeline(isolate_groups=True, isolate_gathers=True, bucket=True, overlap=True)
    assert (chunked.memory.policy, chunked.parallelism.world_size) == ("offload", 8)
    assert tensor == replace(one, name="pipeline_tp", steps=2, parallelism=Parallelism(world_size=8, ep=2, tp=2, pp=2))
    for case, other in ((tied, one), (tied_unstaged, unstaged)):
        assert case == replace(other, name=case.name, schedule=replace(other.schedule, tied=True))
    assert shared == replace(one, name=shared.name, schedule=shared.schedule)
    assert shared_unstaged == replace(of_passes[1], name=shared_unstaged.name, schedule=shared_unstaged.schedule)
    assert (
        shared.schedule.shared
        and shared_unstaged.schedule.shared
        and not (shared.schedule.tied or tied.schedule.shared)
    )
    assert (llama3.model.family, llama3.stages, llama3.parallelism.tp) == ("llama3", 4, 2)


def test_the_debug_model_runs_in_the_three_chunkings_on_fewer_ranks_and_steps():
    sizes = (p.numel() for p in build_model(debug.CASES[0].model).parameters())
    assert round(sum(sizes) / 1e6) == 33 and model_config(debug.CASES[0].model).num_layers == 6
    for case, base in zip(debug.CASES, chunking.CASES[:3], strict=True):
        assert (case.chunking, case.expected, case.steps, case.grad_norm) == (base.chunking, "EQUAL", 2, True)
        assert (case.model.flavor, case.parallelism.world_size, case.parallelism.ep) == ("debugmodel", 4, 2)


def test_the_published_model_has_sixteen_billion_parameters_and_runs_where_gpus_are():
    seq, placed, small = published.CASES
    with torch.device("meta"):
        assert round(sum(p.numel() for p in build_model(seq.model).parameters()) / 1e9, 1) == 15.7
    assert seq.model == placed.model and seq.requires == placed.requires == "cuda" and small.requires is None
    assert seq.pipeline == small.pipeline == Pipeline(isolate_groups=True, bucket=True, overlap=True)
    assert seq.memory == small.memory and small.memory.policy == "offload"
    assert {case.steps for case in published.CASES} == {10} and placed.autoplace.memory_mib == 78_000


@pytest.mark.parametrize(
    ("base", "stem"),
    [
        (chunking.transformer_batch, "blocks_batch"),
        (chunking.moe_batch, "experts_batch"),
        (chunking.moe_seq, "experts_seq"),
    ],
)
def test_a_variant_changes_what_its_name_says_of_a_chunking_and_nothing_else(base, stem):
    for suffix, changes in shapes.VARIANTS.items():
        case = cases.CASES[f"{stem}_{suffix}"]
        assert case == replace(base, name=case.name, family="shapes", steps=5, **changes)


@pytest.mark.parametrize("name", ["transformer_batch", "moe_batch", "moe_seq"])
def test_the_name_of_a_main_case_selects_it_alone(name):
    assert [case.name for case in select(cases.all_cases(), name)] == [name]


def test_a_shard_of_the_uneven_model_is_padded_or_padding_alone_for_dense_and_for_expert_parameters():
    ranks, shards = 8, 4  # all, and those that share the parameters of half of the experts
    model = build_model(cases.CASES["experts_seq_uneven"].model)
    dense = {name: p.shape[0] for name, p in model.named_parameters() if ".experts." not in name}
    assert {name for name, rows in dense.items() if rows % ranks} == {
        "tok_embeddings.weight",
        "output.weight",
        "layers.0.feed_forward.w1.weight",
        "layers.0.feed_forward.w3.weight",
        *(f"layers.{layer}.attention.{name}.weight" for layer in range(3) for name in ("wkv_a", "kv_norm")),
        *(f"layers.{layer}.moe.router.weight" for layer in (1, 2)),
    }
    assert holds_padding_alone(dense["layers.1.moe.router.weight"], ranks) == [5, 6, 7]
    experts = {p.shape[0] // 2 for name, p in model.named_parameters() if ".experts." in name}
    assert [holds_padding_alone(rows, shards) for rows in experts] == [[3]]


def holds_padding_alone(rows: int, ranks: int) -> list[int]:
    """The ranks whose shard of `rows` rows begins past the last row."""
    return [rank for rank in range(ranks) if rank * -(-rows // ranks) >= rows]


def test_some_experts_get_no_token_from_any_rank_of_their_group():
    """By counting: there are more experts than rows that the ranks of one expert group route in a step."""
    for stem in ("blocks_batch", "experts_batch", "experts_seq"):
        case = cases.CASES[f"{stem}_idle_experts"]
        routing = model_config(case.model).moe.routing
        rows = case.batch.sequences * case.batch.seq_len * routing.top_k * case.parallelism.ep
        assert rows < routing.num_experts


def test_isolation_is_tried_on_one_object_and_on_two():
    shared, distinct = process_groups.CASES
    assert shared.pipeline.isolate_groups and shared.parallelism.shared_groups
    assert distinct == replace(shared, name="isolate_distinct", parallelism=distinct.parallelism)
    assert not distinct.parallelism.shared_groups
    assert {case.parallelism.ep for case in process_groups.CASES} == {8}, "experts over all ranks, as parameters are"


def test_every_chunking_case_is_also_bucketed():
    for case, plain in zip(bucketing.BUCKETED, chunking.PLAIN, strict=True):
        assert case == replace(plain, name=case.name, family="bucketing", steps=5, pipeline=Pipeline(bucket=True))


def test_buckets_are_also_summed_where_sums_are_rounded():
    assert [case.name for case in bucketing.SEE_ORDER] == [
        "blocks_batch_bucketed_float32",
        "whole_bucketed_float32",
        "blocks_batch_bucketed_bf16_reduce",
        "whole_bucketed_bf16_reduce",
    ]
    for case in bucketing.SEE_ORDER:
        assert case.pipeline.bucket
        assert case.precision.compute == case.precision.reduce, "rounded to what the parts were computed in"


def test_cases_of_compiled_backends_state_a_bound():
    for case in backends.CASES:
        rounds_much = case.precision.compute == "bfloat16"  # the second step's error would mean little
        assert (case.expected, case.steps) == ("CLOSE", 1 if rounds_much else 2)
        assert 0 < case.close_within <= 0.5
        assert case.pipeline.backend != "fx"
    assert [case.name for case in backends.CASES if case.requires] == ["regional_inductor"]


def test_each_chunking_is_compiled_by_regions_in_the_graph_and_in_eager_with_equal_bits():
    of_graph, of_eager = regional.CASES[:3], regional.CASES[3:6]
    for graph, eager, plain in zip(of_graph, of_eager, chunking.PLAIN, strict=False):
        assert (graph.chunking, graph.candidate, graph.pipeline.backend) == (
            plain.chunking,
            "graph",
            "regional_inductor",
        )
        assert (eager.chunking, eager.candidate) == (
            plain.chunking,
            "bitproof.reference.compiled_attention:eager_chunked",
        )
        assert graph.expected == eager.expected == "EQUAL"
        assert not graph.pipeline.regions and graph.model.attention == eager.model.attention == "sdpa"
    on_cuda, marked, halves, halves_on_cuda = regional.CASES[6:]
    assert (halves.candidate, halves.pipeline.backend, halves.expected) == ("joint", "regional_inductor", "EQUAL")
    assert (halves_on_cuda.candidate, halves_on_cuda.pipeline.backend) == ("joint", "regional_inductor")
    assert (halves_on_cuda.model.attention, halves_on_cuda.requires) == ("flex", "cuda")
    assert (on_cuda.requires, on_cuda.pipeline.regions, marked.requires) == ("cuda", (), None)
    assert on_cuda.model == marked.model and marked.model.attention == "flex"
    assert {pattern_of(name) for name, _ in build_model(marked.model).named_modules()} >= set(marked.pipeline.regions)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "expression",
    ["unequal", "chunking and not moe", "not (moe_seq or unequal)"],
)
def test_pytest_selects_the_same_cases_as_the_command_line(expression):
    root = Path(__file__).parents[2]
    flags = f"--rootdir={root} --import-mode=importlib -p no:cacheprovider -q --collect-only".split()
    command = [sys.executable, "-m", "pytest", "cases", *flags, "-k", expression]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    ids = [line.split("[")[1].rstrip("]") for line in found.stdout.splitlines() if "[" in line]
    assert ids == [case.name for case in select(cases.all_cases(), expression)], found.stderr


def test_joint_cases_are_held_against_eager_on_eight_ranks_over_20_steps_where_nothing_is_compiled():
    for case in joint.CASES:
        assert (case.reference, case.candidate, case.chunking) == ("eager", "joint", None)
        assert (case.parallelism.world_size, case.pipeline.bucket) == (8, True)
        is_compiled = case.pipeline.backend != "fx"
        assert case.expected == ("CLOSE" if is_compiled else "EQUAL")
        assert case.steps == (2 if is_compiled else 20)
    assert {case.parallelism.ep for case in joint.CASES if case.model.family == "deepseek_v3"} == {2, 4}
    assert {case.parallelism.tp for case in joint.CASES if case.model.family == "llama3"} == {2, 4}
    assert not [case.name for case in joint.CASES if case.requires], "`-k joint` is judged on any machine"


def test_autoplace_cases_are_held_against_eager_on_four_and_eight_ranks_of_both_families():
    for case in autoplace.CASES:
        assert (case.reference, case.candidate, case.parallelism.tp) == ("eager", "autoplace", 2)
        assert case.expected == ("CLOSE" if case.pipeline.backend == "inductor" else "EQUAL")
        assert case.autoplace is not None and case.autoplace.plan is None
    native = [case for case in autoplace.CASES if case.pipeline.backend == "fx"]
    found = {(case.model.family, case.parallelism.world_size) for case in native}
    assert found == {(family, ranks) for family in ("llama3", "deepseek_v3") for ranks in (4, 8)}


def test_cases_of_layouts_say_how_each_side_lies_and_state_no_bound():
    for case in two_layouts.CASES:
        assert case.is_foreign and case.reference_parallelism is not None
        assert case.close_within is None and case.differs_within is None
        has_experts = case.parallelism.ep > 1
        assert (case.expected == "EQUAL") == (case.most_ranks == 2 and not has_experts)
    sizes = {(case.reference_parallelism.world_size, case.parallelism.world_size) for case in two_layouts.CASES}
    assert sizes == {(2, 2), (2, 4), (4, 4), (8, 8), (1, 8)}


def test_torchs_schedules_meet_each_other_and_no_pipeline_on_two_to_eight_ranks():
    cases = [case for case in pipelines.CASES if case.is_foreign and case.name.startswith("schedules")]
    pairs = {(case.reference.partition(":")[2], case.candidate.partition(":")[2]) for case in cases}
    assert {name for pair in pairs for name in pair} == {
        "gpipe", "one_f_one_b", "interleaved", "zero_bubble", "unstaged", "whole",
    }  # fmt: skip
    assert {case.parallelism.world_size for case in cases} == {2, 4, 8}
    assert [case.name for case in cases if case.expected == "CLOSE"] == ["schedules_whole"]


def test_rings_are_held_against_a_whole_sequence_against_each_other_and_against_gathered_parts():
    sides = {
        case.name: ((case.reference_parallelism or case.parallelism).world_size, case.parallelism.world_size)
        for case in context_parallel.CASES
    }
    assert sides == {"ring_two": (1, 2), "ring_four": (1, 4), "ring_halved": (2, 4), "ring_gathered": (4, 4)}
    assert [case.name for case in context_parallel.CASES if case.expected == "EQUAL"] == ["ring_gathered"]
