"""Activations computed again in backward: the graph's text, its bits, and layouts, alone and in chunks."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.functional import dropout

from bitproof.harness.graph.analysis.saved_activations import TAG_KEY, is_backward
from bitproof.harness.graph.origin import RECOMPUTED_KEY
from bitproof.harness.graph.passes.rematerialize import rematerialize
from bitproof.harness.graph.tracing.trace import JointGraph
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.records import PassReport
from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    Sketch,
    batch,
    bits,
    copied,
    differing,
    listing,
    names,
    parameter,
    run_eager,
    run_graph,
    trace,
    verify,
)
from tests.harness.graph.memory_graphs import N, aten, context_with, rewritten, run, two_blocks, with_policy
from tests.harness.graph.passes.chunk.test_chunk import Block

POLICIES = ("selective", "full", "offload")
CHUNKINGS = [("layers.*", "batch"), ("layers.*.moe", "batch"), ("layers.*.moe", "seq"), (None, "batch")]
# Each policy and each chunking twice or more; the others at night.
IN_ALL_WAYS = [
    pytest.param(policy, *chunking, marks=pytest.mark.slow if (i // 2 + j) % 2 and policy != "full" else ())
    for i, policy in enumerate(POLICIES)
    for j, chunking in enumerate(CHUNKINGS)
]


# -- the text -----------------------------------------------------------------------------------------


def test_each_block_is_recomputed_as_its_backward_needs_it_once_for_all_readers() -> None:
    blocks = two_blocks()
    module = rewritten(blocks.module, context_with(blocks.sketch, "full"))
    verify(module)
    assert listing(module)[9:] == [
        "sum_1 = sum(add_1)",
        "ones_like = ones_like(add_1)",
        "mm_1_recomputed = mm(add, w)",
        "cos = cos(mm_1_recomputed)",
        "mul = mul(ones_like, cos)",
        "sin_1_recomputed = sin(mm_1_recomputed)",
        "t_1_recomputed = t(sin_1_recomputed)",
        "mm_2 = mm(mul, t_1_recomputed)",
        "mm_3 = mm(add, mm_2)",
        "mm_recomputed = mm(neg, w)",
        "cos_1 = cos(mm_recomputed)",
        "mul_1 = mul(mm_2, cos_1)",
        "sin_recomputed = sin(mm_recomputed)",
        "t_recomputed = t(sin_recomputed)",
        "mm_4 = mm(mul_1, t_recomputed)",
        "mm_5 = mm(neg, mm_4)",
        "return [sum_1, mm_3, mm_5]",
    ]


def test_what_selective_saves_is_read_and_not_recomputed() -> None:
    blocks = two_blocks()
    module = rewritten(blocks.module, context_with(blocks.sketch, "selective"))
    assert listing(module)[9:] == [
        "sum_1 = sum(add_1)",
        "ones_like = ones_like(add_1)",
        "cos = cos(mm_1)",
        "mul = mul(ones_like, cos)",
        "sin_1_recomputed = sin(mm_1)",
        "t_1_recomputed = t(sin_1_recomputed)",
        "mm_2 = mm(mul, t_1_recomputed)",
        "mm_3 = mm(add, mm_2)",
        "cos_1 = cos(mm)",
        "mul_1 = mul(mm_2, cos_1)",
        "sin_recomputed = sin(mm)",
        "t_recomputed = t(sin_recomputed)",
        "mm_4 = mm(mul_1, t_recomputed)",
        "mm_5 = mm(neg, mm_4)",
        "return [sum_1, mm_3, mm_5]",
    ]


def test_of_listed_products_every_second_is_recomputed_from_the_one_before() -> None:
    """By hand: sin(mm(mm(x, w), w)), of which the first product is saved."""
    sketch = Sketch()
    x, w = sketch.placeholder("x", N, N), sketch.placeholder("w", N, N)
    first = sketch.call(aten.mm.default, x, w, at="layers.0")
    second = sketch.call(aten.mm.default, first, w, at="layers.0")
    loss = sketch.call(aten.sum.default, sketch.call(aten.sin.default, second, at="layers.0"), at="")
    slope = sketch.call(aten.cos.default, second, at="layers.0", backward=True)
    gradient = sketch.call(aten.mm.default, first, slope, at="layers.0", backward=True)
    module = sketch.finish(loss, gradient)
    inputs = [torch.randn(N, N) for _ in range(2)]
    before = run(module, *inputs)
    context = context_with(sketch, "selective", save=("mm/2",))
    module = rewritten(module, context)
    verify(module)
    assert listing(module) == [
        "mm = mm(x, w)",
        "mm_1 = mm(mm, w)",
        "sin = sin(mm_1)",
        "sum_1 = sum(sin)",
        "mm_1_recomputed = mm(mm, w)",
        "cos = cos(mm_1_recomputed)",
        "mm_2 = mm(mm, cos)",
        "return [sum_1, mm_2]",
    ]
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(run(module, *inputs), before, strict=True))


@pytest.mark.parametrize(("modules", "dim"), CHUNKINGS)
def test_a_step_whose_saved_operators_are_listed_keeps_the_bits_of_eager(modules: str | None, dim: Any) -> None:
    model, x = Layers(Block(), Block(), Block()), batch()
    joint = trace(model, x, dim=1 if dim == "seq" else 0)
    module, _ = with_policy(joint, "selective", modules, dim, save=("mm/2",))
    recomputed = {node.target for node in module.graph.nodes if node.meta.get(RECOMPUTED_KEY)}
    assert aten._scaled_dot_product_flash_attention_for_cpu.default in recomputed
    assert not differing(run_graph(module, joint, model, x), run_eager(model, x, modules, dim))


def test_a_recomputed_call_is_marked_and_stays_a_forward_call_of_its_module() -> None:
    blocks = two_blocks()
    context = context_with(blocks.sketch, "full")
    module = rewritten(blocks.module, context)
    recomputed = [node for node in module.graph.nodes if node.meta.get(RECOMPUTED_KEY)]
    assert context.facts["recomputed_nodes"] == len(recomputed) == 6
    for node in recomputed:
        assert node.name.endswith("_recomputed") and TAG_KEY not in node.meta
        assert node.meta["origin"].direction == "forward" and node.meta["origin"].module in ("layers.0", "layers.1")


def test_an_untagged_graph_comes_back_untouched() -> None:
    blocks = two_blocks()
    before = listing(blocks.module)
    assert listing(rematerialize(blocks.module, blocks.sketch.context())) == before


def test_launch_and_wait_are_recomputed_side_by_side() -> None:
    c10d = torch.ops._c10d_functional
    sketch = Sketch()
    x = sketch.placeholder("x", N)
    waited = sketch.call(c10d.wait_tensor.default, sketch.call(c10d.all_gather_into_tensor.default, x, 2, "fsdp"))
    loss = sketch.call(aten.sum.default, waited)
    gradient = sketch.call(aten.neg.default, waited, backward=True)
    module = rewritten(sketch.finish(loss, gradient), context_with(sketch, "full"))
    assert listing(module)[-4:] == [
        "all_gather_into_tensor_recomputed = all_gather_into_tensor(x, 2, fsdp)",
        "wait_tensor_recomputed = wait_tensor(all_gather_into_tensor_recomputed)",
        "neg = neg(wait_tensor_recomputed)",
        "return [sum_1, neg]",
    ]


def test_a_reader_of_a_buffer_keeps_its_place_before_the_write() -> None:
    sketch = Sketch()
    counts = sketch.placeholder("counts", N)
    early = sketch.call(aten.exp.default, counts)
    derived = sketch.call(aten.sin.default, early)
    sketch.call(aten.add_.Tensor, counts, 1)
    loss = sketch.call(aten.sum.default, derived)
    module = sketch.finish(loss, sketch.call(aten.neg.default, derived, backward=True))
    before = run(module, torch.arange(4.0))
    after = run(rewritten(module, context_with(sketch, "full")), torch.arange(4.0))
    assert names(module, "exp", "sin") == ["exp", "sin", "sin_recomputed"]
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(before, after, strict=True))


# -- the bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_two_blocks_keep_their_bits(policy: str) -> None:
    inputs = [torch.randn(N, N, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    blocks = two_blocks()
    before = run(blocks.module, *inputs)
    after = run(rewritten(blocks.module, context_with(blocks.sketch, policy)), *inputs)
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(before, after, strict=True))


class Blocks(NamedTuple):
    """A model of three blocks, its batch, its step as traced, and the step after all passes."""

    model: Layers
    x: Tensor
    joint: JointGraph
    module: GraphModule
    reports: list[PassReport]


traced = functools.cache(trace)
THREE, BATCH = Layers(Block(), Block(), Block()), batch()


@functools.cache
def three_blocks(policy: str, modules: str | None, dim: str) -> Blocks:
    """Made once for all tests that only read them. Passes change what they are given: each gets a copy of the trace."""
    joint = copied(traced(THREE, BATCH, dim=("batch", "seq").index(dim)))
    return Blocks(THREE, BATCH, joint, *with_policy(joint, policy, modules, dim))


@pytest.mark.parametrize(("policy", "modules", "dim"), IN_ALL_WAYS)
def test_blocks_of_attention_and_experts_keep_eagers_bits(policy: str, modules: str | None, dim: str) -> None:
    model, x, joint, module, reports = three_blocks(policy, modules, dim)
    assert {report.name: report.facts for report in reports}["rematerialize"]["recomputed_nodes"] > 30
    assert not differing(run_graph(module, joint, model, x), run_eager(model, x, modules, dim))


@pytest.mark.parametrize("policy", POLICIES)
def test_random_draws_are_not_repeated(policy: str) -> None:
    model = Layers(*(Applied(lambda m, x: dropout(x.sin() @ m.w, 0.5).cos(), w=parameter(D, D)) for _ in range(3)))
    joint, x = trace(model), batch()
    module, _ = with_policy(joint, policy, "layers.*")
    torch.manual_seed(1)
    step = run_graph(module, joint, model, x)
    torch.manual_seed(1)
    assert not differing(step, run_eager(model, x, "layers.*"))


# -- layouts ------------------------------------------------------------------------------------------


class Values(Interpreter):
    """Keeps every tensor that a graph computes."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.found[n.name] = value = super().run_node(n)
        return value


def of_original(node: Node) -> str:
    return node.name.replace("_recomputed", "")


@pytest.mark.parametrize(("policy", "modules", "dim"), IN_ALL_WAYS)
def test_every_recomputed_value_and_each_of_its_inputs_has_the_originals_bits_and_strides(
    policy: str, modules: str | None, dim: str
) -> None:
    model, x, joint, module, _ = three_blocks(policy, modules, dim)
    values = Values(module)
    state = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        values.run(*(state[name] for name in (*joint.parameter_names, *joint.buffer_names)), x)
    nodes = {node.name: node for node in module.graph.nodes}
    recomputed = [node for node in nodes.values() if node.meta.get(RECOMPUTED_KEY)]
    compared = 0
    for node in recomputed:
        original = nodes.get(of_original(node))
        if original is None:
            continue  # only backward needed it, so forward no longer computes it
        assert original.target is node.target
        pairs = [(original, node), *zip(original.all_input_nodes, node.all_input_nodes, strict=True)]
        for first, second in pairs:
            a, b = values.found[first.name], values.found[second.name]
            if isinstance(a, Tensor):
                assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), (first, second)
                assert torch.equal(bits(a), bits(b)), (first, second)
                compared += 1
    assert compared > 80


def test_a_recomputed_sequence_half_is_made_contiguous_as_the_first_time() -> None:
    model = Layers(*(Normed() for _ in range(2)))
    joint, x = trace(model, dim=1), batch()
    module, _ = with_policy(joint, "full", "layers.*.inner", "seq")
    clones = [name for name in names(module, "clone") if "recomputed" in name]
    assert clones == [f"cos{i}_recomputed_clone_chunk{chunk}" for i in ("_1", "") for chunk in (0, 1)]
    assert not differing(run_graph(module, joint, model, x), run_eager(model, x, "layers.*.inner", "seq"))


class Normed(nn.Module):
    """A chunked module whose input is cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Applied(lambda m, x: (x @ m.w).sin(), w=parameter(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.cos()) + x


# -- chunk after chunk --------------------------------------------------------------------------------


def test_a_whole_chunk_is_recomputed_and_run_backward_before_the_next() -> None:
    model = Layers(*(Applied(lambda m, x: (x @ m.w).sin().exp(), w=parameter(D, D)) for _ in range(2)))
    module, _ = with_policy(trace(model), "full", "layers.*")
    start = next(node for node in module.graph.nodes if is_backward(node))
    cuts = names(module, "slice")  # both halves of a live-in are cut where the first is read
    order = [n for n in module.graph.nodes if n > start and CHUNK_KEY in n.meta and n.name not in cuts]
    of_block = {
        block: [node.meta[CHUNK_KEY] for node in order if node.meta["origin"].module == block]
        for block in ("layers.0", "layers.1")
    }
    assert all(chunks == sorted(chunks) and set(chunks) == {0, 1} for chunks in of_block.values())
    assert any(node.meta.get(RECOMPUTED_KEY) for node in order)


def test_backward_reads_no_activation_that_was_to_be_recomputed() -> None:
    joint = trace(Layers(Block(), Block()))
    module, _ = with_policy(joint, "full", "layers.*.moe")
    again = {of_original(node) for node in module.graph.nodes if node.meta.get(RECOMPUTED_KEY)}
    late = [node for node in module.graph.nodes if is_backward(node) or node.meta.get(RECOMPUTED_KEY)]
    read = {x.name for node in late for x in node.all_input_nodes if not x.meta.get(RECOMPUTED_KEY)}
    assert again and read and not again & read
