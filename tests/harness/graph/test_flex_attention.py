"""FlexAttention through the pipeline: a higher-order operator, its nested graphs, and the tensors its mask reads."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from bitproof.harness.case import Chunking
from bitproof.harness.errors import ChunkError, TraceError
from bitproof.harness.graph.analysis.dependencies import dependencies, reorder
from bitproof.harness.graph.passes.chunk import chunk
from bitproof.harness.graph.passes.concretize_symbols import concretize_symbols
from bitproof.harness.graph.symbols import carries
from bitproof.harness.graph.tracing.trace import JointGraph, trace_joint_step
from bitproof.reference.chunking import chunk_modules
from bitproof.reference.layers.attention import attend
from bitproof.reference.layers.document_mask import document_mask
from tests.harness.graph.graphs import (
    CPU,
    SEED,
    B,
    D,
    S,
    Sketch,
    Step,
    batch,
    bits,
    calls,
    chunked,
    copied,
    differing,
    listing,
    mean_square,
    parameter,
    run_graph,
    symbols_left,
    trace,
)

aten = torch.ops.aten
flex_attention = torch.ops.higher_order.flex_attention


# -- traced -------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(D, D)

    def forward(self, x_BSD: Tensor, attention_masks: object | None = None) -> Tensor:
        x_BSHQ = (x_BSD @ self.w).unflatten(-1, (2, D // 2))
        return attend(x_BSHQ, x_BSHQ, x_BSHQ, scale=0.5, attention_masks=attention_masks).flatten(2)


class Mix(nn.Module):
    """Attention that stays whole, then a layer that treats each token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Layer()
        self.moe = nn.Linear(D, D, bias=False)

    def forward(self, x_BSD: Tensor, attention_masks: object | None = None) -> Tensor:
        y_BSD: Tensor = self.moe(self.attention(x_BSD, attention_masks))
        return y_BSD


class Model(nn.Module):
    """Layers under one mask, made outside of them from the input; documents start where its first element is big."""

    def __init__(self, *layers: nn.Module, make_mask: Callable[[Tensor], BlockMask] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.make_mask = make_mask or (lambda x_BSD: document_mask(x_BSD[..., 0] > 0.5, block_size=4))

    def forward(self, x_BSD: Tensor) -> Tensor:
        mask = self.make_mask(x_BSD)
        for layer in self.layers:
            x_BSD = layer(x_BSD, mask)
        return x_BSD


def run_eager(model: nn.Module, x: Tensor, modules: str | None, dim: Any, *, folded: bool = False) -> Step:
    """One step of eager, in chunks by the reference's own wrapper."""
    model = copy.deepcopy(model)
    if modules:
        chunk_modules(model, Chunking(dim=dim, modules=modules), folded=folded)
    parameters = dict(model.named_parameters())
    loss = mean_square(model)(x)
    gradients = torch.autograd.grad(loss, list(parameters.values()), torch.full_like(loss, SEED))
    return {"loss": loss.detach()} | {f"grad {name}": g for name, g in zip(parameters, gradients, strict=True)}


@pytest.mark.parametrize(
    ("layer", "modules", "dim", "dtype"),
    [
        (Layer, None, "batch", torch.bfloat16),
        (Layer, None, "seq", torch.float32),
        (Layer, "layers.*", "batch", torch.bfloat16),
        (Mix, "layers.*.moe", "seq", torch.float32),
        (Mix, "layers.*.moe", "seq", torch.bfloat16),
    ],
)
def test_the_graph_has_eagers_bits(
    layer: Callable[[], nn.Module], modules: str | None, dim: Any, dtype: torch.dtype
) -> None:
    model, x = Model(layer(), layer()).to(dtype), batch(dtype)
    joint = trace(model, x, dim=("batch", "seq").index(dim))
    module = chunked(joint, modules, dim)
    assert not differing(run_graph(module, joint, model, x), run_eager(model, x, modules, dim))
    assert not symbols_left(module, joint.chunk_symbol.symbol)


class FoldedModel(Model):
    """The same over folded tokens: x is (T, D), and a document ends with a sequence of S tokens."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        index_T = torch.arange(x_BSD.shape[0])
        offsets_T = torch.where(x_BSD[:, 0] > 0.5, index_T, index_T - index_T % S).cummax(0).values
        for layer in self.layers:
            x_BSD = layer(x_BSD, offsets_T)
        return x_BSD


class FoldedLayer(Layer):
    def forward(self, x_BSD: Tensor, attention_masks: object | None = None) -> Tensor:
        x_THQ = (x_BSD @ self.w).unflatten(-1, (2, D // 2))
        return attend(x_THQ, x_THQ, x_THQ, scale=0.5, attention_masks=attention_masks).flatten(1)


def folded_batch() -> Tensor:
    return batch().flatten(0, 1)


@pytest.mark.parametrize("modules", [None, "layers.*"])
def test_the_graph_of_folded_tokens_has_eagers_bits(modules: str | None) -> None:
    model, x = FoldedModel(FoldedLayer(), FoldedLayer()), folded_batch()
    joint = trace(model, x)
    module = chunked(joint, modules)
    assert not differing(run_graph(module, joint, model, x), run_eager(model, x, modules, "batch", folded=True))
    assert not symbols_left(module, joint.chunk_symbol.symbol)


def test_each_chunk_of_folded_tokens_has_the_mask_of_its_own_half_of_the_offsets() -> None:
    module = chunked(trace(FoldedModel(FoldedLayer()), folded_batch()), "layers.*")
    for index, node in enumerate(calls(module, "flex_attention")):
        documents = operands(node)["documents"]
        [half] = documents.all_input_nodes
        assert half.args[1:] == (0, index * B * S // 2, (index + 1) * B * S // 2)
        assert documents.meta["val"].shape == (1, B * S // 2)


def test_folded_attention_along_seq_is_refused_in_the_graph_too() -> None:
    with pytest.raises(ChunkError, match="cannot chunk attention `flex_attention` along the sequence"):
        chunked(trace(FoldedModel(FoldedLayer()), folded_batch()), "layers.*", "seq")


@functools.cache
def traced_layer() -> JointGraph:
    return trace(Model(Layer()))


def one_layer() -> JointGraph:
    """The step of one layer, for passes to change."""
    return copied(traced_layer())


def test_a_trace_for_chunks_refuses_neither_the_operator_nor_its_backward() -> None:
    model, chunking = Model(Layer()), Chunking(dim="batch", modules="layers.*")
    joint = trace_joint_step(
        model, mean_square(model), [batch()], chunk_dim=0, gradient_seed=SEED, device=CPU, chunking=chunking
    )
    assert len(calls(joint.module, "flex_attention_backward")) == 1


def test_each_layer_is_one_operator_and_one_backward_and_chunks_double_both() -> None:
    joint = trace(Model(Layer(), Layer()))
    module = chunked(joint, "layers.*")
    both = "flex_attention", "flex_attention_backward"
    assert [len(calls(joint.module, name)) for name in both] == [2, 2]
    assert [node.name for name in both for node in calls(module, name)] == [
        f"{name}{layer}_chunk{index}" for name in both for layer in ("", "_1") for index in (0, 1)
    ]


def operands(node: Node) -> dict[str, Node]:
    """The tensors a forward call is handed, by what they are."""
    q, k, v, _, (_, _, *blocks, _), *_, captured = node.args  # type: ignore[misc]
    tensors = {f"block {i}": x for i, x in enumerate(blocks) if isinstance(x, Node)}
    return {"q": q, "k": k, "v": v, "documents": captured[0]} | tensors  # type: ignore[dict-item, index, return-value]


def test_all_tensors_that_a_trace_hands_the_operator_carry_the_symbol() -> None:
    joint = one_layer()
    [node] = calls(joint.module, "flex_attention")
    assert len(operands(node)) == 4 + 8
    assert all(carries(x.meta["val"], joint.chunk_symbol.symbol) for x in operands(node).values())


def test_every_reference_to_a_nested_graph_has_it_as_its_value() -> None:
    joint = one_layer()
    for module in (joint.module, chunked(joint, "layers.*")):
        references = module.graph.find_nodes(op="get_attr")
        assert references and all(x.meta["val"] is getattr(module, x.target) for x in references)


def test_a_chunk_is_handed_its_own_rows_of_the_mask() -> None:
    module = chunked(one_layer(), "layers.*")
    for index, node in enumerate(calls(module, "flex_attention")):
        documents = operands(node)["documents"]
        assert documents.args[1:] == (0, index * B // 2, (index + 1) * B // 2)
        assert all(x.meta["val"].shape[0] == B // 2 for x in operands(node).values())


def test_backward_reads_its_chunks_own_forward() -> None:
    module = chunked(one_layer(), "layers.*")
    forward, backward = calls(module, "flex_attention"), calls(module, "flex_attention_backward")
    for first, second in zip(forward, backward, strict=True):
        assert second.args[:3] == first.args[:3]
        out, logsumexp = second.args[3:5]
        assert (out.args, logsumexp.args) == ((first, 0), (first, 1))  # type: ignore[union-attr]


def test_values_have_the_layout_that_running_gives() -> None:
    """The output follows the query's strides, here those of a transposed view."""
    module = chunked(one_layer(), "layers.*")
    for node in calls(module, "flex_attention"):
        assert node.meta["val"][0].stride() == node.args[0].meta["val"].stride() == (S * D, D // 2, D, 1)


def test_a_sequence_chunk_through_flex_attention_is_refused() -> None:
    with pytest.raises(ChunkError) as error:
        chunked(trace(Model(Layer()), dim=1), "layers.*", "seq")
    assert str(error.value) == (
        "ChunkError: cannot chunk attention `flex_attention` along the sequence: every position reads earlier ones\n"
        "  expected: modules that treat each token alone, such as layers.*.moe\n"
        "  found: flex_attention\n"
        f"  came from: layers.0 (forward), {kernel_line()}, pass chunk\n"
        "  fix: chunk along batch, or choose modules='layers.*.moe'"
    )


def kernel_line() -> str:
    """Where the reference calls the operator."""
    [node] = calls(traced_layer().module, "flex_attention")
    source: str = node.meta["origin"].source
    assert source.startswith("reference/layers/attention.py:")
    return source


def test_the_graph_may_be_reordered_around_the_operator() -> None:
    model, x = Model(Layer(), Layer()), batch()
    joint = trace(model, x)
    module = chunked(joint, "layers.*")
    before = run_graph(module, joint, model, x)
    for node in calls(module, "flex_attention"):
        assert dependencies(module.graph)[node] == set(node.all_input_nodes)
    reorder(module, key=lambda node: -len(node.name))
    module.recompile()
    assert not differing(before, run_graph(module, joint, model, x))


# -- what a nested graph may not do -------------------------------------------------------------------


def traced_under(mask_mod: Callable[[Tensor], Callable[..., Tensor]]) -> JointGraph:
    """The trace of a model whose mask function is `mask_mod(documents)`."""

    def make_mask(x_BSD: Tensor) -> BlockMask:
        mask = document_mask(x_BSD[..., 0] > 0.5)
        [documents_BS] = mask.mask_mod.captured  # type: ignore[attr-defined]
        mask.mask_mod = mask_mod(documents_BS)
        return mask

    return trace(Model(Layer(), make_mask=make_mask))


def test_a_mask_function_of_its_indices_alone_is_traced() -> None:
    joint = traced_under(lambda documents: lambda b, h, q, kv: q >= kv)
    assert len(calls(joint.module, "flex_attention")) == 1


def refusal(found: str) -> str:
    return (
        "TraceError: nested graph `sdpa_mask0` of flex_attention does more than compute from operands\n"
        "  expected: a pure function of the operator's arguments\n"
        f"  found: {found}\n"
        f"  came from: layers.0 (forward), {kernel_line()}\n"
        "  fix: hand the operator each tensor that its function reads; draw and write outside of it"
    )


def closing_over(documents: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: documents[b, q] == documents[b, kv]


def drawing(documents: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: (q >= kv) & (torch.rand(()) < 0.5)


def writing(documents: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: q.clone().add_(1) >= kv


@pytest.mark.parametrize(
    ("mask_mod", "found"),
    [
        (closing_over, "`_tensor_constant0`, a tensor that its function closes over"),
        (drawing, "`rand`, a random draw"),
        (writing, "`add_`, a write in place"),
    ],
)
def test_what_a_pass_would_not_see_is_refused(mask_mod: Any, found: str) -> None:
    with pytest.raises(TraceError) as error:
        traced_under(mask_mod)
    assert str(error.value) == refusal(found)


# -- by hand ------------------------------------------------------------------------------------------


def nested(sketch: Sketch, build: Callable[[], Any]) -> Node:
    """A reference to a graph of its own: what `build` adds to the sketch, and returns as its output."""
    outer, sketch.graph = sketch.graph, Graph()
    sketch.graph.output(build())
    inner = GraphModule({}, sketch.graph)
    sketch.graph = outer
    reference = sketch.attribute(build.__name__, inner)
    reference.meta["val"] = inner
    return reference


def attending() -> tuple[GraphModule, Sketch]:
    """FlexAttention of x with itself within documents, by a mask function that asks for the batch's size.

    The attention is of layers.0; its negation, of layers.1.
    """
    sketch = Sketch()
    x, documents = sketch.placeholder("x", sketch.n, 1, S, D), sketch.placeholder("documents", sketch.n, S)
    counts = sketch.placeholder("counts", sketch.n, 1, 1, dtype=torch.int32)

    def indices() -> list[Node]:
        return [sketch.placeholder(name, dtype=torch.int32) for name in ("b", "h", "q", "kv")]

    def score_mod() -> Node:
        score = sketch.placeholder("score")
        indices()
        return score

    def mask_mod() -> Node:
        b, _, q, kv = indices()
        documents = sketch.placeholder("documents", sketch.n, S)
        last = sketch.call(operator.sub, sketch.call(aten.sym_size.int, documents, 0), 1)
        row = sketch.call(aten.clamp.default, b, None, last)
        mine, theirs = (sketch.call(aten.index.Tensor, documents, [row, index]) for index in (q, kv))
        return sketch.call(aten.eq.Tensor, mine, theirs)

    blocks = (S, S, counts, None, 128, 128, nested(sketch, mask_mod))
    options = {"OUTPUT_LOGSUMEXP": True}
    score = nested(sketch, score_mod)
    y = sketch.call(flex_attention, x, x, x, score, blocks, 0.5, options, (), (documents,))
    out = sketch.call(aten.neg.default, sketch.call(operator.getitem, y, 0), at="layers.1")
    return sketch.finish(sketch.call(aten.sum.default, out, at=""), out), sketch


def inputs_by_hand() -> tuple[Tensor, Tensor, Tensor]:
    """Documents 0 to 2 of two tokens each; each row's numbering begins elsewhere, so rows must not be mixed up."""
    documents = torch.arange(S).div(2, rounding_mode="floor") + 10.0 * torch.arange(B).unsqueeze(1)
    documents[3] = 0.0
    return batch().unsqueeze(1), documents, torch.ones(B, 1, 1, dtype=torch.int32)


def by_dense_attention() -> Tensor:
    x, documents, _ = inputs_by_hand()
    seen = (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)
    return -scaled_dot_product_attention(x, x, x, attn_mask=seen, scale=0.5)


def nested_listing(module: GraphModule, name: str) -> list[str]:
    graph_module = getattr(module, name)
    assert isinstance(graph_module, GraphModule)
    return listing(graph_module)


def mask_listing(last: int) -> list[str]:
    return [
        f"clamp = clamp(b, None, {last})",
        "index = index(documents, [clamp, q])",
        "index_1 = index(documents, [clamp, kv])",
        "eq = eq(index, index_1)",
        "return eq",
    ]


def test_concretizing_leaves_numbers_in_the_operator_and_its_nested_graphs() -> None:
    module, sketch = attending()
    result = concretize_symbols(module, sketch.context())
    assert listing(result) == [
        "mask_mod = mask_mod_4",
        "score_mod = score_mod_4",
        "flex_attention = flex_attention(x, x, x, score_mod, [6, 6, counts, None, 128, 128, mask_mod], 0.5, "
        "{'OUTPUT_LOGSUMEXP': True}, [], [documents])",
        "getitem = getitem(flex_attention, 0)",
        "neg = neg(getitem)",
        "sum_1 = sum(neg)",
        "return [sum_1, neg]",
    ]
    assert nested_listing(result, "mask_mod_4") == mask_listing(3)
    assert nested_listing(result, "score_mod_4") == ["return score"]
    assert not symbols_left(result, sketch.symbol.symbol)
    torch.testing.assert_close(result(*inputs_by_hand())[1], by_dense_attention())


def called(index: int, score_mod: str, mask_mod: str) -> str:
    x = f"x_slice_chunk{index}"
    return (
        f"flex_attention_chunk{index} = flex_attention({x}, {x}, {x}, {score_mod}, "
        f"[6, 6, counts_slice_chunk{index}, None, 128, 128, {mask_mod}], 0.5, "
        f"{{'OUTPUT_LOGSUMEXP': True}}, [], [documents_slice_chunk{index}])"
    )


def test_a_chunk_splits_operands_wherever_they_stand_and_shares_nested_graphs() -> None:
    module, sketch = attending()
    result = chunk(module, sketch.context("layers.0"))
    assert listing(result) == [
        "x_slice_chunk0 = slice(x, 0, 0, 2)",
        "x_slice_chunk1 = slice(x, 0, 2, 4)",
        "score_mod = score_mod_2",
        "counts_slice_chunk0 = slice(counts, 0, 0, 2)",
        "counts_slice_chunk1 = slice(counts, 0, 2, 4)",
        "mask_mod = mask_mod_2",
        "documents_slice_chunk0 = slice(documents, 0, 0, 2)",
        "documents_slice_chunk1 = slice(documents, 0, 2, 4)",
        called(0, "score_mod", "mask_mod"),
        "getitem_chunk0 = getitem(flex_attention_chunk0, 0)",
        "score_mod_1 = score_mod_2",
        "mask_mod_1 = mask_mod_2",
        called(1, "score_mod_1", "mask_mod_1"),
        "getitem_chunk1 = getitem(flex_attention_chunk1, 0)",
        "getitem_cat = cat([getitem_chunk0, getitem_chunk1], 0)",
        "neg = neg(getitem_cat)",
        "sum_1 = sum(neg)",
        "return [sum_1, neg]",
    ]
    assert nested_listing(result, "mask_mod_2") == mask_listing(1)
    assert not symbols_left(result, sketch.symbol.symbol)
    torch.testing.assert_close(result(*inputs_by_hand())[1], by_dense_attention())


def test_chunks_by_hand_have_the_bits_of_two_calls() -> None:
    module, sketch = attending()
    whole = concretize_symbols(attending()[0], sketch.context())
    halves = [whole(*(x[rows] for x in inputs_by_hand()))[1] for rows in (slice(0, 2), slice(2, 4))]
    result = chunk(module, sketch.context("layers.*"))
    assert torch.equal(bits(result(*inputs_by_hand())[1]), bits(torch.cat(halves)))


def test_an_operator_in_no_chosen_module_is_written_once() -> None:
    module, sketch = attending()
    once = listing(concretize_symbols(attending()[0], sketch.context()))
    assert "flex_attention = " in once[2]
    assert sorted(listing(chunk(module, sketch.context("layers.1")))[:4]) == sorted(once[:4])


def test_the_nearest_sequence_chunk_is_refused() -> None:
    module, sketch = attending()
    with pytest.raises(ChunkError, match="cannot chunk attention `flex_attention` along the sequence"):
        chunk(module, sketch.context("layers.*", "seq"))
