"""Chosen modules run in two chunks: the graph's text, its bits, and the graphs that are refused.

What eager does is the model: cut the module's input, run the module's forward on each half, concatenate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from bitproof.harness.case import Chunking
from bitproof.harness.errors import ChunkError
from bitproof.harness.graph.passes.chunk import chunk
from bitproof.harness.graph.writer import CHUNK_KEY
from tests.harness.graph.graphs import (
    SEED,
    Applied,
    B,
    D,
    Layers,
    Sketch,
    assert_as_eager,
    batch,
    bits,
    calls,
    chunked,
    context_of,
    differing,
    listing,
    names,
    parameter,
    run_eager,
    run_graph,
    symbols_left,
    trace,
)

aten = torch.ops.aten
BF16 = torch.bfloat16


def scaling() -> Applied:
    return Applied(lambda m, x: x * m.w, w=parameter(D))


def mixing() -> Applied:
    return Applied(lambda m, x: x.sin() @ m.w, w=parameter(D, D))


class Residual(Layers):
    """Adds each layer's input to its output, outside the layer."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Block(nn.Module):
    """Attention and a mixture of experts, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Applied(_attention, w=parameter(D, D))
        self.moe = Applied(_route, w=parameter(D, D), v=parameter(D, D), counts=torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.moe(x)


def _attention(module: Applied, x: Tensor) -> Tensor:
    q = (x @ module.w).view(*x.shape[:2], 2, D // 2).transpose(1, 2)
    return scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)


def _route(module: Applied, x: Tensor) -> Tensor:
    """Send each token to one of two experts, by its sign; count the tokens of each."""
    rows = x.reshape(-1, D)
    expert = (rows[:, 0].detach() > 0).to(torch.int64)
    counts = torch.stack([(expert == 0).sum(), (expert == 1).sum()])
    module.counts.mul_(0.5).add_(counts)
    order = torch.argsort(expert, stable=True)
    first, second = rows[order].split(counts.tolist())
    out = torch.cat([first @ module.w, second @ module.v])
    return torch.zeros_like(rows).index_put((order,), out).view(x.shape)


# -- the text -----------------------------------------------------------------------------------------


def test_two_layers_in_batch_chunks_hand_their_chunks_on_and_run_one_chunk_after_the_other() -> None:
    module = assert_as_eager(Layers(scaling(), scaling()), "layers.*")
    assert listing(module) == [
        "arg1_1_slice_chunk0 = slice(arg1_1, 0, 0, 2)",
        "arg1_1_slice_chunk1 = slice(arg1_1, 0, 2, 4)",
        "mul_chunk0 = mul(arg1_1_slice_chunk0, arg0_1)",
        "mul_chunk1 = mul(arg1_1_slice_chunk1, arg0_1)",
        "mul_1_chunk0 = mul(mul_chunk0, arg0_2)",
        "mul_1_chunk1 = mul(mul_chunk1, arg0_2)",
        "mul_1_cat = cat([mul_1_chunk0, mul_1_chunk1], 0)",
        "pow_1 = pow(mul_1_cat, 2)",
        "mean = mean(pow_1)",
        "full_like = full_like(mean, 0.125, pin_memory=False)",
        "expand = expand(full_like, [4, 6, 8])",
        "div = div(expand, 192)",
        "pow_2 = pow(mul_1_cat, 1.0)",
        "mul_2 = mul(pow_2, 2.0)",
        "mul_3 = mul(div, mul_2)",
        "mul_3_slice_chunk0 = slice(mul_3, 0, 0, 2)",
        "mul_3_slice_chunk1 = slice(mul_3, 0, 2, 4)",
        "mul_4_chunk0 = mul(mul_3_slice_chunk0, mul_chunk0)",
        "mul_5_chunk0 = mul(mul_3_slice_chunk0, arg0_2)",
        "sum_1_chunk0 = sum(mul_4_chunk0, [0, 1], True)",
        "view_chunk0 = view(sum_1_chunk0, [8])",
        "mul_4_chunk1 = mul(mul_3_slice_chunk1, mul_chunk1)",
        "mul_5_chunk1 = mul(mul_3_slice_chunk1, arg0_2)",
        "sum_1_chunk1 = sum(mul_4_chunk1, [0, 1], True)",
        "view_chunk1 = view(sum_1_chunk1, [8])",
        "view_add = add(view_chunk0, view_chunk1)",
        "mul_6_chunk0 = mul(mul_5_chunk0, arg1_1_slice_chunk0)",
        "sum_2_chunk0 = sum(mul_6_chunk0, [0, 1], True)",
        "view_1_chunk0 = view(sum_2_chunk0, [8])",
        "mul_6_chunk1 = mul(mul_5_chunk1, arg1_1_slice_chunk1)",
        "sum_2_chunk1 = sum(mul_6_chunk1, [0, 1], True)",
        "view_1_chunk1 = view(sum_2_chunk1, [8])",
        "view_1_add = add(view_1_chunk0, view_1_chunk1)",
        "return [mean, view_1_add, view_add]",
    ]


def test_sequence_chunks_of_an_input_are_made_contiguous_and_those_of_a_gradient_are_views_of_it() -> None:
    module = assert_as_eager(Layers(scaling()), "layers.*", "seq")
    assert [line for line in listing(module) if "slice" in line or "cat" in line][:7] == [
        "arg1_1_slice_chunk0 = slice(arg1_1, 1, 0, 3)",
        "arg1_1_clone_chunk0 = clone(arg1_1_slice_chunk0, memory_format=torch.contiguous_format)",
        "arg1_1_slice_chunk1 = slice(arg1_1, 1, 3, 6)",
        "arg1_1_clone_chunk1 = clone(arg1_1_slice_chunk1, memory_format=torch.contiguous_format)",
        "mul_cat = cat([mul_chunk0, mul_chunk1], 1)",
        "pow_1 = pow(mul_cat, 2)",
        "pow_2 = pow(mul_cat, 1.0)",
    ]
    assert names(module, "slice")[2:] == ["mul_2_slice_chunk0", "mul_2_slice_chunk1"]
    assert len(calls(module, "clone")) == 2


def test_only_the_modules_of_the_pattern_are_chunked() -> None:
    module = assert_as_eager(Layers(mixing(), mixing(), mixing()), "layers.1")
    owners = {n.meta["origin"].module for n in module.graph.nodes if CHUNK_KEY in n.meta and "slice" not in n.name}
    assert owners == {"layers.1"}


def test_every_chunked_node_says_which_chunk_it_computes() -> None:
    module = assert_as_eager(Layers(mixing()), "layers.*")
    for node in module.graph.nodes:
        assert node.meta.get(CHUNK_KEY) == ({"chunk0": 0, "chunk1": 1}.get(node.name.rsplit("_", 1)[-1]))


def test_a_pattern_that_matches_nothing_is_refused_naming_what_ran() -> None:
    with pytest.raises(ChunkError) as error:
        chunked(trace(Layers(scaling(), scaling())), "blocks.*")
    assert str(error.value) == (
        "ChunkError: the chunking pattern 'blocks.*' matches no module of the graph\n"
        "  expected: a pattern over the modules that ran: layers.0, layers.1\n"
        "  found: no match\n"
        "  came from: pass chunk\n"
        "  fix: correct `modules` in the case's Chunking"
    )


def test_no_value_or_argument_of_the_result_carries_the_symbol() -> None:
    joint = trace(Layers(Block(), Block()))
    symbol = joint.chunk_symbol.symbol
    assert symbols_left(joint.module, symbol), "before"
    assert not symbols_left(chunked(joint, "layers.*.moe"), symbol)


# -- the bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "dim"),
    [("layers.*", "batch"), ("layers.*.moe", "batch"), ("layers.*.moe", "seq"), ("layers.1", "batch"), (None, "batch")],
)
def test_blocks_of_attention_and_experts_have_the_bits_of_eager_chunks(modules: str | None, dim: str) -> None:
    assert_as_eager(Layers(Block(), Block()), modules, dim)


def test_another_chunking_is_not_taken_for_the_same_bits() -> None:
    model, x = Layers(Block(), Block()), batch()
    joint = trace(model, x)
    step = run_graph(chunked(joint, "layers.*.moe"), joint, model, x)
    assert "buffer layers.0.moe.counts" in differing(step, run_eager(model, x))


def test_a_residual_outside_the_layers_is_added_whole_and_its_gradient_once_a_chunk() -> None:
    module = assert_as_eager(Residual(mixing(), mixing(), mixing()), "layers.*")
    assert names(module, "add")[:3] == ["add", "add_1", "add_2"]
    ownerless = [n.name for n in calls(module, "add") if n.meta["origin"].module is None]
    assert ownerless == ["add_3_chunk0", "add_3_chunk1", "add_4_chunk0", "add_4_chunk1"]


def test_a_residual_within_the_layers_never_leaves_its_chunk() -> None:
    module = assert_as_eager(Layers(Residual(mixing()), Residual(mixing()), Residual(mixing())), "layers.*")
    assert names(module, "cat") == ["add_2_cat"], "the last layer's output"


class Branching(Layers):
    """Two layers read one value, so that autograd adds their gradients of it, outside every module."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) * self.layers[2](x)


@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_the_gradients_of_two_modules_readings_are_added_chunk_by_chunk(dim: str) -> None:
    module = assert_as_eager(Branching(mixing(), mixing(), mixing()), "layers.*", dim)
    if dim == "batch":
        ownerless = [n for n in calls(module, "add") if n.meta["origin"].module is None]
        assert [n.name for n in ownerless if n.args[0].name.startswith("mul")] == ["add_chunk0", "add_chunk1"]  # type: ignore[union-attr]


def test_data_dependent_sizes_get_their_own_symbols_once_a_chunk() -> None:
    module = assert_as_eager(
        Layers(Applied(_route, w=parameter(D, D), v=parameter(D, D), counts=torch.zeros(2))), "layers.*"
    )
    scalars = calls(module, "_local_scalar_dense")
    assert [n.meta[CHUNK_KEY] for n in scalars] == [0, 0, 1, 1]
    symbols = {str(n.meta["val"]) for n in scalars}
    assert len(symbols) == 4 and "u0" not in symbols, "u0 is the chunk symbol's name"


def test_what_static_state_alone_decides_is_computed_once_for_both_chunks() -> None:
    model = Layers(Applied(lambda m, x: x * m.w.to(BF16), w=parameter(D)))
    x = batch(BF16)
    joint = trace(model, x)
    module = chunked(joint, "layers.*")
    assert names(module, "_to_copy")[0] == "_to_copy", "the parameter's cast"
    assert not differing(run_graph(module, joint, model, x), run_eager(model, x, "layers.*"))


def test_an_all_gather_is_launched_once_for_both_chunks() -> None:
    sketch = Sketch()
    w, x = sketch.placeholder("w", 2), sketch.placeholder("x", sketch.n, 6, 8)
    gathered = sketch.call(torch.ops._c10d_functional.all_gather_into_tensor.default, w, 4, "DP")
    waited = sketch.call(torch.ops._c10d_functional.wait_tensor.default, gathered)
    y = sketch.call(aten.mul.Tensor, x, waited)
    loss = sketch.call(aten.sum.default, y, at="")
    assert listing(chunk(sketch.finish(loss), sketch.context("layers.*"))) == [
        "all_gather_into_tensor = all_gather_into_tensor(w, 4, DP)",
        "wait_tensor = wait_tensor(all_gather_into_tensor)",
        "x_slice_chunk0 = slice(x, 0, 0, 2)",
        "x_slice_chunk1 = slice(x, 0, 2, 4)",
        "mul_chunk0 = mul(x_slice_chunk0, wait_tensor)",
        "mul_chunk1 = mul(x_slice_chunk1, wait_tensor)",
        "mul_cat = cat([mul_chunk0, mul_chunk1], 0)",
        "sum_1 = sum(mul_cat)",
        "return [sum_1]",
    ]


def test_an_expert_all_to_all_is_launched_once_a_chunk() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, 6, 8)
    size = sketch.call(aten.sym_size.int, x, 0)
    sent = sketch.call(torch.ops._c10d_functional.all_to_all_single.default, x, [size], [size], "EP")
    received = sketch.call(torch.ops._c10d_functional.wait_tensor.default, sent)
    loss = sketch.call(aten.sum.default, received, at="")
    assert [
        line for line in listing(chunk(sketch.finish(loss), sketch.context("layers.*"))) if "all_to_all" in line
    ] == [
        "all_to_all_single_chunk0 = all_to_all_single(x_slice_chunk0, [2], [2], EP)",
        "wait_tensor_chunk0 = wait_tensor(all_to_all_single_chunk0)",
        "all_to_all_single_chunk1 = all_to_all_single(x_slice_chunk1, [2], [2], EP)",
        "wait_tensor_chunk1 = wait_tensor(all_to_all_single_chunk1)",
    ]


def test_a_constant_of_the_forward_is_shared() -> None:
    constant = Applied(lambda m, x: x * torch.arange(1.0, 9.0) * torch.tensor([2.0] * D) * m.w, w=parameter(D))
    assert_as_eager(Layers(constant), "layers.*")


def test_a_size_in_arithmetic_is_the_chunks_size() -> None:
    assert_as_eager(
        Layers(Applied(lambda m, x: x * m.w * (x.shape[0] * 0.7 * 0.3) ** -0.5, w=parameter(D))), "layers.*"
    )


def test_chunks_that_are_not_contiguous_are_handed_on_as_eager_lays_them_out() -> None:
    """The sum over a row has another order, and other bits, when its elements do not lie side by side."""
    turned = Applied(lambda m, x: (x @ m.w).transpose(1, 2).contiguous().transpose(1, 2), w=parameter(D, D))
    summing = Applied(lambda m, x: x * x.sum(-1, keepdim=True) * m.w, w=parameter(D))
    module = assert_as_eager(Layers(turned, summing), "layers.*")
    assert len(calls(module, "cat")) == 2, "joined between the layers, and cut again"


@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_a_bias_at_the_end_sums_its_gradient_in_eagers_order(dim: str) -> None:
    """A sequence chunk of the incoming gradient is not contiguous in eager, which decides the order of the sum."""
    assert_as_eager(
        Layers(Applied(lambda m, x: x.sin() @ m.w + m.b, w=parameter(D, D), b=parameter(D))), "layers.*", dim
    )


# -- buffers, temporaries and random numbers --------------------------------------------------------


def observe(module: Applied, x: Tensor) -> Tensor:
    module.average.mul_(0.5).add_(x.detach().mean())
    return x * module.w


def test_buffer_writes_become_a_chain_chunk_1_after_chunk_0() -> None:
    model = Layers(Applied(observe, w=parameter(D), average=torch.ones(())))
    module = assert_as_eager(model, "layers.*")
    assert [line for line in listing(module) if "mean" in line or "mul_(" in line][:6] == [
        "mul__chunk0 = mul_(arg0_2, 0.5)",
        "mean_chunk0 = mean(arg1_1_slice_chunk0)",
        "add__chunk0 = add_(mul__chunk0, mean_chunk0)",
        "mul__chunk1 = mul_(arg0_2, 0.5)",
        "mean_chunk1 = mean(arg1_1_slice_chunk1)",
        "add__chunk1 = add_(mul__chunk1, mean_chunk1)",
    ]


def test_a_write_that_reads_no_input_is_still_made_once_a_chunk() -> None:
    count = Applied(lambda m, x: (m.calls.add_(1), x * m.w)[1], w=parameter(D), calls=torch.zeros(()))
    model, x = Layers(count), batch()
    joint = trace(model, x)
    assert run_graph(chunked(joint, "layers.*"), joint, model, x)["buffer layers.0.calls"] == 2
    assert_as_eager(model, "layers.*")


def test_a_buffer_that_is_read_before_it_is_written_is_read_once_a_chunk() -> None:
    def forward(module: Applied, x: Tensor) -> Tensor:
        gain = module.average * 2
        return observe(module, x) * gain

    assert_as_eager(Layers(Applied(forward, w=parameter(D), average=torch.ones(()))), "layers.*")


class Reading(Layers):
    """Reads a layer's buffer when the layer has run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.layers[0].average * 1.5)


class Writing(Layers):
    """Writes a layer's buffer when the layer has run."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.layers[0].average.mul_(0.25)
        return y


class ReadingAndWriting(Layers):
    """Does one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.layers[0].average.clone()
        self.layers[0].average.mul_(0.25)
        return y


class Viewing(Layers):
    """Looks at a layer's buffer before the layer runs, and reads what it sees afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        view = self.layers[0].average.view(1)
        return super().forward(x) * (view + 1)


@pytest.mark.parametrize("model", [Reading, Writing, ReadingAndWriting, Viewing])
def test_whoever_touches_the_buffer_from_outside_waits_for_both_chunks(model: type[Layers]) -> None:
    assert_as_eager(model(Applied(observe, w=parameter(D), average=torch.ones(()))), "layers.*")


def test_a_temporary_that_is_written_in_place_exists_once_a_chunk() -> None:
    def forward(module: Applied, x: Tensor) -> Tensor:
        total = torch.zeros(D)
        total.add_(x.detach().sum((0, 1)))
        module.seen.add_(total)
        return x * module.w

    module = assert_as_eager(Layers(Applied(forward, w=parameter(D), seen=torch.zeros(D))), "layers.*")
    assert names(module, "zeros") == ["zeros_chunk0", "zeros_chunk1"]


def test_a_temporary_that_is_only_read_is_shared() -> None:
    module = assert_as_eager(Layers(Applied(lambda m, x: x * m.w + torch.zeros(D), w=parameter(D))), "layers.*")
    assert names(module, "zeros") == ["zeros"]


class Drawing(Layers):
    """Draws a random number after its layers have run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(D)


def test_random_numbers_are_drawn_in_eagers_order() -> None:
    layers = [Applied(lambda m, x: dropout(x @ m.w) * torch.rand(D), w=parameter(D, D)) for _ in range(2)]
    model, x = Drawing(*layers), batch()
    joint = trace(model, x)
    module = chunked(joint, "layers.*")
    torch.manual_seed(7)
    step = run_graph(module, joint, model, x)
    torch.manual_seed(7)
    assert not differing(step, run_eager(model, x, "layers.*"))


# -- gradients ----------------------------------------------------------------------------------------


def _reduced(sketch: Sketch) -> Any:
    """A bfloat16 gradient of a parameter, its cast, its reduce-scatter over DP, and the wait."""
    w, x = sketch.placeholder("w", 8), sketch.placeholder("x", sketch.n, 6, 8, dtype=BF16)
    y = sketch.call(aten.mul.Tensor, x, w)
    loss = sketch.call(aten.sum.default, y, at="")
    gradient = sketch.call(aten.sum.dim_IntList, x, [0, 1], backward=True)
    cast = sketch.call(aten._to_copy.default, gradient, dtype=torch.float32, backward=True)
    scattered = sketch.call(
        torch.ops._c10d_functional.reduce_scatter_tensor.default, cast, "sum", 4, "DP", backward=True
    )
    waited = sketch.call(torch.ops._c10d_functional.wait_tensor.default, scattered, backward=True)
    return sketch.finish(loss, waited)


def test_without_early_accumulation_each_chunk_is_cast_and_reduced_by_itself_and_added_last() -> None:
    sketch = Sketch()
    assert listing(chunk(_reduced(sketch), sketch.context("layers.*")))[6:] == [
        "sum_2_chunk0 = sum(x_slice_chunk0, [0, 1])",
        "_to_copy_chunk0 = _to_copy(sum_2_chunk0, dtype=torch.float32)",
        "reduce_scatter_tensor_chunk0 = reduce_scatter_tensor(_to_copy_chunk0, sum, 4, DP)",
        "wait_tensor_chunk0 = wait_tensor(reduce_scatter_tensor_chunk0)",
        "sum_2_chunk1 = sum(x_slice_chunk1, [0, 1])",
        "_to_copy_chunk1 = _to_copy(sum_2_chunk1, dtype=torch.float32)",
        "reduce_scatter_tensor_chunk1 = reduce_scatter_tensor(_to_copy_chunk1, sum, 4, DP)",
        "wait_tensor_chunk1 = wait_tensor(reduce_scatter_tensor_chunk1)",
        "wait_tensor_add = add(wait_tensor_chunk0, wait_tensor_chunk1)",
        "return [sum_1, wait_tensor_add]",
    ]


def test_with_early_accumulation_chunks_are_added_before_one_cast_and_one_reduction() -> None:
    sketch = Sketch()
    assert listing(chunk(_reduced(sketch), sketch.context("layers.*", early=True)))[6:] == [
        "sum_2_chunk0 = sum(x_slice_chunk0, [0, 1])",
        "sum_2_chunk1 = sum(x_slice_chunk1, [0, 1])",
        "sum_2_add = add(sum_2_chunk0, sum_2_chunk1)",
        "_to_copy = _to_copy(sum_2_add, dtype=torch.float32)",
        "reduce_scatter_tensor = reduce_scatter_tensor(_to_copy, sum, 4, DP)",
        "wait_tensor = wait_tensor(reduce_scatter_tensor)",
        "return [sum_1, wait_tensor]",
    ]


def _gradient_in_bf16(x: Tensor) -> list[Tensor]:
    """The gradient that each half of x, times a cast parameter, gives in bfloat16."""
    w = parameter(D).detach().to(BF16).requires_grad_()
    products = [half * w for half in x.split(B // 2)]
    loss = torch.cat(products).float().square().mean()
    incoming = torch.autograd.grad(loss, products, torch.full_like(loss, SEED))
    halves = zip(products, incoming, strict=True)
    return [torch.autograd.grad(product, w, gradient, retain_graph=True)[0] for product, gradient in halves]


@pytest.mark.parametrize("early", [False, True])
def test_gradients_have_the_bits_of_their_stated_order_of_cast_and_addition(early: bool) -> None:
    model, x = Layers(Applied(lambda m, x: x * m.w.to(BF16), w=parameter(D))), batch(BF16)
    joint = trace(model, x)
    found = run_graph(chunked(joint, "layers.*", early=early), joint, model, x)["grad layers.0.w"]
    first, second = _gradient_in_bf16(x)
    late, soon = first.float() + second.float(), (first + second).float()
    assert torch.equal(bits(found), bits(soon if early else late))
    assert not torch.equal(bits(late), bits(soon)), "the order can be told"


def test_early_accumulation_does_not_cross_a_narrowing_cast() -> None:
    model, x = Layers(Applied(lambda m, x: x.float() * m.w.float(), w=parameter(D, dtype=BF16))), batch(BF16)
    module = chunked(trace(model, x), "layers.*", early=True)
    assert listing(module)[-2:] == [
        "_to_copy_2_add = add(_to_copy_2_chunk0, _to_copy_2_chunk1)",
        "return [mean, _to_copy_2_add]",
    ]


def test_a_gradient_is_added_as_soon_as_both_chunks_are_there() -> None:
    module = chunked(trace(Layers(mixing(), mixing())), "layers.*")
    order = [n.name for n in module.graph.nodes]
    adds = names(module, "add")
    assert len(adds) == 2
    assert order.index(adds[0]) < max(order.index(n.name) for n in calls(module, "cos")), (
        "layer 1's, before layer 0 runs"
    )


def test_a_parameter_that_is_read_once_by_each_of_two_layers_of_which_none_is_chunked_is_accepted() -> None:
    w = parameter(D)
    tied = [Applied(lambda m, x: x * m.w, w=w) for _ in range(2)]
    assert_as_eager(Layers(tied[0], mixing(), tied[1]), "layers.1")


def test_a_parameter_tied_between_two_chunked_layers_is_refused() -> None:
    """Eager adds ((b1 + b0) + a1) + a0; adding chunk by chunk, or layer by layer, gives other bits."""
    w = parameter(D, D)
    with pytest.raises(ChunkError) as error:
        chunked(trace(Layers(*[Applied(lambda m, x: x @ m.w, w=w) for _ in range(2)])), "layers.*")
    assert str(error.value) == (
        "ChunkError: cannot add the gradients of two uses of one parameter in `add`: at least one is chunked\n"
        "  expected: a parameter that is read once, in one chunked module "
        "(eager adds chunks and uses in another order)\n"
        "  found: mm_2 in layers.1 (backward), mm_4 in layers.0 (backward)\n"
        "  came from: no module (backward), pass chunk\n"
        "  fix: read the parameter once in the module, or chunk modules that do not share it"
    )


def test_a_parameter_read_twice_in_one_chunked_layer_is_refused() -> None:
    twice = Applied(lambda m, x: (x @ m.w).sin() @ m.w, w=parameter(D, D))
    with pytest.raises(ChunkError, match="two uses of one parameter in `add`"):
        chunked(trace(Layers(twice)), "layers.*")


def test_a_parameter_read_in_a_chunked_and_in_a_whole_layer_is_refused() -> None:
    w = parameter(D, D)
    layers = [Applied(lambda m, x: x @ m.w, w=w) for _ in range(2)]
    with pytest.raises(ChunkError, match="two uses of one parameter in `add`"):
        chunked(trace(Layers(*layers)), "layers.0")


def test_a_parameter_cast_outside_and_read_in_two_chunked_layers_is_refused() -> None:
    class Casting(Layers):
        def forward(self, x: Tensor) -> Tensor:
            w = self.w.to(BF16)
            return self.layers[1](self.layers[0](x, w), w)

    class Multiplying(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return x.sin() @ w

    model = Casting(Multiplying(), Multiplying())
    model.w = parameter(D, D)
    with pytest.raises(ChunkError, match="two uses of one parameter in `add`"):
        chunked(trace(model, batch(BF16)), "layers.*")


def test_a_cast_parameter_read_twice_in_one_chunked_layer_is_accepted() -> None:
    """Each chunk's own cast gathers both uses before the parameter sees them."""

    def forward(module: Applied, x: Tensor) -> Tensor:
        w = module.w.to(BF16)
        return (x @ w).sin() @ w

    assert_as_eager(Layers(Applied(forward, w=parameter(D, D))), "layers.*", x=batch(BF16))


def test_of_the_matching_modules_only_the_named_ones_are_chunked() -> None:
    model = Layers(mixing(), mixing())
    joint = trace(model)
    context = context_of(joint, "layers.*")
    context = replace(context, chunking=Chunking(dim="batch", modules="layers.*", only=("layers.1",)))
    module = chunk(joint.module, context)
    assert context.facts["modules"] == ["layers.1"]
    assert differing(run_graph(module, joint, model, batch()), run_eager(model, batch(), "layers.1")) == []


def test_the_chunked_modules_are_reported_in_the_order_in_which_they_run() -> None:
    joint = trace(Layers(mixing(), scaling(), mixing()))
    context = context_of(joint, "layers.*")
    chunk(joint.module, context)
    assert context.facts["modules"] == ["layers.0", "layers.1", "layers.2"]


def test_the_calls_of_each_chunked_module_are_reported() -> None:
    model = Layers(mixing(), scaling())
    model.layers.append(model.layers[1])
    joint = trace(model)
    context = context_of(joint, "layers.*")
    with pytest.raises(ChunkError, match="gradients of two uses of one parameter"):
        chunk(joint.module, context)
    model = Layers(mixing(), Applied(lambda module, x: x.sin()))
    model.layers.append(model.layers[1])
    joint = trace(model)
    context = context_of(joint, "layers.*")
    chunk(joint.module, context)
    assert context.facts["calls"] == {"layers.0": 1, "layers.1": 2}


def test_a_named_module_that_did_not_run_is_refused() -> None:
    joint = trace(Layers(scaling()))
    context = context_of(joint, "layers.*")
    context = replace(context, chunking=Chunking(dim="batch", modules="layers.*", only=("layers.0", "layers.7")))
    with pytest.raises(ChunkError) as error:
        chunk(joint.module, context)
    assert str(error.value) == (
        "ChunkError: layers.7 cannot be chunked, as no such module ran\n"
        "  expected: modules of the graph that layers.* matches\n"
        "  found: only=('layers.0', 'layers.7')\n"
        "  fix: correct `only` in the case's Chunking"
    )
