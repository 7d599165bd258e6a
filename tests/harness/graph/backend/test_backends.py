"""Inductor on whole graphs and on regions: what it keeps, what it changes, what it refuses, what it leaves behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from bitproof.harness.errors import MachineError, PassError
from bitproof.harness.graph.backend import backends
from bitproof.harness.graph.backend.backends import compile_for, compile_halves
from bitproof.harness.graph.operators import operator_name
from tests.harness.graph.graphs import Applied, Layers, batch, chunked, differing, parameter, run_graph, trace
from tests.harness.graph.joint_graphs import Counting, partitioned

pytestmark = pytest.mark.ranks

ROWS = torch.tensor([5, 19])


def step(module, x_BSD):
    """Writes into a buffer twice, splits by counts that are data, and has a chain of operators to fuse."""
    module.calls.add_(1)
    first, second = x_BSD.flatten(0, 1).split(module.counts.tolist())
    rows = torch.cat([first * 2, second]).to(torch.bfloat16)
    y = functional.silu(rows @ module.w.to(torch.bfloat16)) * rows.exp().rsqrt()
    module.calls.add_(module.calls)
    return functional.layer_norm(y.float(), y.shape[-1:]).view(x_BSD.shape)


def make_model() -> nn.Module:
    return Layers(Applied(step, w=parameter(8, 8), calls=torch.zeros(3), counts=ROWS.clone()))


@pytest.fixture(scope="module")
def joint():
    return trace(make_model())


@pytest.fixture(scope="module")
def graph(joint):
    return chunked(joint, None)


@pytest.fixture(scope="module")
def compiled(graph):
    return compile_for(graph, "inductor", {})


def children() -> set[str]:
    return {child.name() for child in psutil.Process().children(recursive=True)}


# The whole graph.


@pytest.mark.slow
def test_a_compiled_step_computes_what_the_graph_does_and_writes_into_the_buffers_it_is_given(joint, graph, compiled):
    reference = run_graph(graph, joint, make_model(), batch())
    candidate = run_graph(compiled, joint, make_model(), batch())
    assert reference.keys() == candidate.keys()
    for name, value in reference.items():
        torch.testing.assert_close(candidate[name], value, rtol=1e-2, atol=1e-4, msg=name)
    assert candidate["buffer layers.0.calls"].tolist() == [2, 2, 2]


@pytest.mark.slow
def test_a_compiled_step_repeats_itself_bit_for_bit(joint, compiled):
    first, second = (run_graph(compiled, joint, make_model(), batch()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_what_was_generated_has_one_hash_for_one_step_and_another_for_another(compiled, gathering):
    """Traced anew, as every process does: of sizes that it has compiled once, a trace knows more the second time."""
    again = compile_for(chunked(trace(make_model()), None), "inductor", {})
    other = compile_for(gathering, "inductor", {"somebody": 2})
    hashes = [step.facts["generated_hash"] for step in (compiled, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.slow
def test_other_split_sizes_need_no_other_code(joint, graph, compiled):
    model = make_model()
    model.layers[0].counts.copy_(torch.tensor([24, 0]))
    reference, candidate = (run_graph(f, joint, model, batch()) for f in (graph, compiled))
    torch.testing.assert_close(candidate["loss"], reference["loss"], rtol=1e-3, atol=0)


@pytest.mark.slow
def test_the_given_graph_stays_as_it_is(joint, graph, compiled):
    assert graph.code == chunked(joint, None).code


@pytest.mark.slow
def test_compiling_leaves_no_process_no_setting_and_no_group_behind(compiled):
    assert not {name for name in children() if "python" in name or "g++" in name or "cc1plus" in name}
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") != str(compiled.folder)
    from torch._inductor import config

    assert not config.deterministic and config.fx_graph_cache


def test_the_files_go_with_the_step(joint, graph, monkeypatch):
    def fake(module):
        Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "kernel.so").touch()
        return module, {}

    monkeypatch.setattr(backends, "compile_whole", fake)
    step = compile_for(graph, "inductor", {})
    folder = step.folder
    assert [path.name for path in folder.iterdir()] == ["kernel.so"]
    del step
    gc.collect()
    assert not folder.exists()


def test_a_compilation_that_fails_leaves_no_file_and_says_why(graph, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(module):
        raise RuntimeError("no lowering\nand more")

    monkeypatch.setattr(backends, "compile_whole", fail)
    with pytest.raises(PassError) as error:
        compile_for(graph, "inductor", {})
    assert str(error.value) == "PassError: inductor cannot compile the graph\n  found: RuntimeError: no lowering"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def gathering():
    """A graph with a collective over the group `somebody`."""
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        x = torch.empty(4, 3)

    def gather(x):
        ops = torch.ops._c10d_functional
        return (ops.wait_tensor(ops.all_gather_into_tensor(x * 2, 2, "somebody")) + 1,)

    return make_fx(gather, tracing_mode="real")(x)


@pytest.mark.slow
def test_groups_are_known_by_name_and_size_while_compiling_and_not_after(gathering):
    from torch.distributed.distributed_c10d import _resolve_process_group

    assert compile_for(gathering, "inductor", {"somebody": 2}).facts["backend"] == "inductor"
    with pytest.raises(RuntimeError, match="somebody"):
        _resolve_process_group("somebody")


def test_a_group_that_is_not_known_is_refused_by_name(gathering):
    with pytest.raises(PassError, match="registered under the name somebody"):
        compile_for(gathering, "inductor", {"nobody": 2})


@pytest.mark.parametrize("backend", ["inductor", "regional_inductor"])
@pytest.mark.parametrize("how", ["CXX names nothing", "PATH holds no compiler"])
def test_without_a_compiler_a_cpu_step_is_refused(graph, monkeypatch, tmp_path, backend, how):
    monkeypatch.setenv("CXX", "/nonexistent")
    program = "/nonexistent"
    if how == "PATH holds no compiler":
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", str(tmp_path))
        program = "g++"
    with pytest.raises(MachineError) as error:
        compile_for(graph, backend, {})
    assert str(error.value) == (
        "MachineError: Inductor cannot compile for this CPU without a C++ compiler\n"
        "  expected: a compiler of a one-line program: the command in CXX, or else g++\n"
        f"  found: no program {program} is found\n"
        "  fix: install g++, or name another compiler in CXX; see `bitproof doctor`"
    )


# Regions.


def attention(module, x_BSD):
    q = (x_BSD @ module.w).unflatten(-1, (2, 4)).transpose(1, 2)
    y = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return y.transpose(1, 2).flatten(2)


@pytest.mark.slow
def test_sdpa_and_its_backward_are_regions_of_their_own_once_a_chunk_with_the_graphs_bits():
    model = Layers(Applied(attention, w=parameter(8, 8)))
    joint = trace(model)
    graph = chunked(joint, "layers.*")
    before = graph.code
    step = compile_for(graph, "regional_inductor", {})
    facts = dict(step.facts)
    assert len(facts.pop("generated_hash")) == 64 and facts.pop("launches") < 4
    assert facts == {"backend": "regional_inductor", "regions_compiled": 4, "nodes_compiled": 4}
    left = {operator_name(node) for node in step.step.graph.nodes if node.op == "call_function"}
    assert not any("attention" in name for name in left) and "mm" in left
    assert graph.code == before
    assert not differing(run_graph(graph, joint, model, batch()), run_graph(step, joint, model, batch()))


@pytest.mark.slow
def test_a_marked_module_is_compiled_once_a_chunk_and_direction_and_the_rest_runs_as_it_is():
    def chain(module, x_BSD):
        module.calls.add_(1)
        return (x_BSD @ module.w).exp().rsqrt()

    model = Layers(Applied(chain, w=parameter(8, 8), calls=torch.zeros(3)), Applied(attention, w=parameter(8, 8)))
    joint = trace(model)
    graph = chunked(joint, "layers.*")
    step = compile_for(graph, "regional_inductor", {}, ("layers.0",))
    assert step.facts["regions_compiled"] == 5 < step.facts["nodes_compiled"] and step.facts["launches"] > 0
    left = {operator_name(node) for node in step.step.graph.nodes if node.op == "call_function"}
    assert not left & {"exp", "rsqrt"} and {"mm", "add_"} <= left and any("attention" in name for name in left)
    reference, candidate = (run_graph(f, joint, model, batch()) for f in (graph, step))
    for name, value in reference.items():
        largest = float(value.abs().max())  # sums of terms of either sign, so elements have the error of the largest
        torch.testing.assert_close(candidate[name], value, rtol=1e-5, atol=1e-5 * largest, msg=name)
    assert candidate["buffer layers.0.calls"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("patterns", "expected", "fix"),
    [
        (
            (),
            "a graph with an attention operator, which regional_inductor compiles",
            "mark regions in the case, or choose fx",
        ),
        (("layers.9",), "calls of modules that layers.9 matches", "correct pipeline.regions in the case"),
    ],
)
def test_a_graph_without_regions_is_refused_and_does_not_run_uncompiled(graph, patterns, expected, fix):
    with pytest.raises(PassError) as error:
        compile_for(graph, "regional_inductor", {}, patterns)
    assert str(error.value) == (
        f"PassError: there is nothing to compile\n  expected: {expected}\n  found: none\n  fix: {fix}"
    )


def same_score(score, batch, head, query, key):
    return score


def causal(batch, head, query, key):
    return query >= key


def flex_graph(*, training):
    """FlexAttention, traced as one higher-order operator, and its backward if `training`."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(causal, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)

    parts = mask.as_tuple()
    options = {"OUTPUT_LOGSUMEXP": training, "OUTPUT_MAX": False}

    def run(q, k, v, *tensors):
        left = iter(tensors)
        blocks = tuple(next(left) if isinstance(part, torch.Tensor) else part for part in parts)
        y, _, _ = torch.ops.higher_order.flex_attention(q, k, v, same_score, blocks, 0.25, options, (), ())
        if training:
            return (y, *torch.autograd.grad(y.sum(), (q, k, v)))
        z, _, _ = torch.ops.higher_order.flex_attention(y * 2, k, v, same_score, blocks, 0.25, options, (), ())
        return (z * 2,)

    inputs = [torch.randn(1, 2, 16, 16, requires_grad=training) for _ in range(3)]
    inputs += [part for part in parts if isinstance(part, torch.Tensor)]
    return make_fx(run, tracing_mode="fake")(*inputs), [x.detach() for x in inputs]


def test_on_a_cpu_a_training_step_with_flex_attention_is_refused_with_inductors_own_reason():
    graph, _ = flex_graph(training=True)
    with pytest.raises(MachineError) as error:
        compile_for(graph, "regional_inductor", {})
    assert error.value.what == "Inductor compiles no training step with FlexAttention on a CPU"
    assert error.value.expected == "a GPU"
    assert "on CPU only supports inference" in str(error.value.found)


def test_what_is_not_inductors_own_refusal_is_no_lack_of_the_machine(monkeypatch):
    def fail(module, region_of):
        raise AssertionError("our own bug")

    monkeypatch.setattr(backends, "compile_regions", fail)
    with pytest.raises(PassError, match="AssertionError: our own bug"):
        compile_for(flex_graph(training=True)[0], "regional_inductor", {})


@pytest.mark.slow
def test_on_a_cpu_forwards_alone_are_compiled_each_a_region_though_they_share_nested_graphs():
    graph, inputs = flex_graph(training=False)
    first, second = (node for node in graph.graph.nodes if operator_name(node) == "flex_attention")
    nested = [[x for x in node.all_input_nodes if x.op == "get_attr"] for node in (first, second)]
    for theirs, shared in zip(nested[1], nested[0], strict=True):
        second.replace_input_with(theirs, shared)
    graph.recompile()
    step = compile_for(graph, "regional_inductor", {})
    assert step.facts["regions_compiled"] == 2
    names = [operator_name(node) for node in step.step.graph.nodes if node.op == "call_function"]
    assert "flex_attention" not in names and names.count("mul") == 2
    with torch.no_grad():
        torch.testing.assert_close(step(*inputs)[0], graph(*inputs)[0], rtol=1e-5, atol=1e-6)


# The halves of a partitioned step.


@pytest.mark.slow
def test_each_half_of_a_partitioned_step_is_compiled_and_both_together_are_the_step():
    model = Layers(Counting())
    found = partitioned(model)
    compiled = compile_halves(found.module, "inductor", {})
    reference, candidate = (run_graph(f, found.joint, model, batch()) for f in (found.module, compiled))
    assert reference.keys() == candidate.keys()
    for name, value in reference.items():
        torch.testing.assert_close(candidate[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert candidate["buffer layers.0.calls"] == 2
    assert {"forward", "backward", "generated_hash"} == compiled.facts.keys()
    assert compiled.facts["forward"] != compiled.facts["backward"]


def test_halves_between_which_sizes_live_that_data_decide_are_refused():
    found = partitioned(make_model())
    with pytest.raises(PassError) as error:
        compile_halves(found.module, "inductor", {})
    assert str(error.value).startswith(
        "PassError: inductor cannot compile a half of a step if the other half determines its sizes\n"
        "  expected: only tensors between forward and backward, as in a step without experts\n"
        "  found: "
    )
    assert str(error.value).endswith("\n  fix: choose the backend fx, or the system graph, which is compiled as one")
