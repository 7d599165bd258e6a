"""Which activations are saved, recomputed and offloaded under each policy, and what never runs twice."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as flex
from torch.fx import GraphModule, Node

from bitproof.harness.graph.passes.tag_memory import tag_memory
from tests.harness.graph.graphs import Sketch, listing
from tests.harness.graph.memory_graphs import N, aten, context_with, tags, two_blocks

c10d = torch.ops._c10d_functional


def tagged(sketch: Sketch, policy: str, *read: Node, **settings: Any) -> dict[str, str]:
    """The tags of a graph whose backward, in blocks 1 and 0, reads `read` in block 0."""
    output = sketch.call(aten.ones.default, [N], at="layers.1", backward=True)
    for node in read:
        output = sketch.call(aten.mul.Tensor, node, output, at="layers.0", backward=True)
    module = sketch.finish(output)
    tag_memory(module, context_with(sketch, policy, **settings), blocks="layers.*")
    return tags(module)


# -- the policies -------------------------------------------------------------------------------------


def test_selective_saves_matrix_products_and_what_enters_a_block_and_recomputes_the_rest() -> None:
    blocks = two_blocks()
    tag_memory(blocks.module, context_with(blocks.sketch, "selective"), blocks="layers.*")
    saved, again = "save", "recompute"
    assert tags(blocks.module) == {
        **{"neg": saved, "mm": saved, "sin": again, "t": again},
        **{"add": saved, "mm_1": saved, "sin_1": again, "t_1": again, "add_1": saved},
    }


def test_full_saves_only_what_enters_a_block() -> None:
    blocks = two_blocks()
    tag_memory(blocks.module, context_with(blocks.sketch, "full"), blocks="layers.*")
    assert [name for name, tag in tags(blocks.module).items() if tag == "save"] == ["neg", "add", "add_1"]


def test_offload_moves_what_selective_saves_but_for_what_the_first_backward_block_reads() -> None:
    blocks = two_blocks()
    context = context_with(blocks.sketch, "offload")
    tag_memory(blocks.module, context, blocks="layers.*")
    assert [name for name, tag in tags(blocks.module).items() if tag == "offload"] == ["neg", "mm"]
    assert context.facts == {"save": 3, "recompute": 4, "offload": 2, "offload_mib": 0.0}


def test_other_blocks_are_a_setting() -> None:
    blocks = two_blocks()
    tag_memory(blocks.module, context_with(blocks.sketch, "full"), blocks="layers.1")
    assert [name for name, tag in tags(blocks.module).items() if tag == "recompute"] == ["mm_1", "sin_1", "t_1"]


def test_a_pattern_that_matches_no_module_saves_everything() -> None:
    blocks = two_blocks()
    before = listing(blocks.module)
    tag_memory(blocks.module, context_with(blocks.sketch, "full"), blocks="blocks.*")
    assert set(tags(blocks.module).values()) == {"save"}
    assert listing(blocks.module) == before


@pytest.mark.parametrize(("elements", "moved"), [(16, ["neg"]), (31, ["neg"]), (32, ["neg", "mm"]), (15, [])])
def test_the_budget_is_kept_to_the_byte_and_the_earliest_of_equals_goes_first(elements: int, moved: list[str]) -> None:
    blocks = two_blocks()
    context = context_with(blocks.sketch, "offload", offload_gib=elements * 4 / 2**30)
    tag_memory(blocks.module, context, blocks="layers.*")
    assert [name for name, tag in tags(blocks.module).items() if tag == "offload"] == moved


def test_the_largest_goes_first() -> None:
    sketch = Sketch()
    small, large = sketch.placeholder("small", N, N), sketch.placeholder("large", N, 8)
    products = [sketch.call(aten.mm.default, small, x) for x in (small, large)]
    budget = large.meta["val"].numel() * 4 / 2**30
    read = [sketch.call(aten.sum.default, x, backward=True) for x in products]
    assert tagged(sketch, "offload", *read, offload_gib=budget) == {"mm": "save", "mm_1": "save"}, "first block"

    sketch = Sketch()
    small, large = sketch.placeholder("small", N, N), sketch.placeholder("large", N, 8)
    products = [sketch.call(aten.mm.default, small, x) for x in (small, large)]
    sketch.call(aten.ones.default, [N], at="layers.1", backward=True)
    read = [sketch.call(aten.sum.default, x, backward=True) for x in products]
    assert tagged(sketch, "offload", *read, offload_gib=budget) == {"mm": "save", "mm_1": "offload"}


# -- what an operator is ------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "tag"), [("selective", "save"), ("full", "recompute")])
def test_a_collective_and_its_wait_go_together(policy: str, tag: str) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", N)
    gathered = sketch.call(c10d.wait_tensor.default, sketch.call(c10d.all_gather_into_tensor.default, x, 2, "fsdp"))
    sketch.call(aten.neg.default, gathered)
    found = tagged(sketch, policy, sketch.call(aten.slice.Tensor, gathered, 0, 0, N, backward=True))
    launch = {} if tag == "save" else {"all_gather_into_tensor": tag}
    assert found == {"wait_tensor": tag} | launch


@pytest.mark.parametrize(("policy", "tag"), [("selective", "save"), ("full", "recompute")])
def test_the_parts_of_attention_are_saved_or_recomputed_as_attention_is(policy: str, tag: str) -> None:
    sketch = Sketch()
    q = sketch.placeholder("q", 2, 2, N, N)
    attention = sketch.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    parts = [sketch.call(operator.getitem, attention, i) for i in (0, 1)]
    found = tagged(sketch, policy, *(sketch.call(aten.sum.default, x, backward=True) for x in parts))
    assert [found["getitem"], found["getitem_1"]] == [tag, tag]
    assert found.get("_scaled_dot_product_flash_attention_for_cpu", "save") == tag


def test_the_views_of_a_split_are_recomputed_from_what_was_split() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", N, N)
    parts = sketch.call(aten.split.Tensor, sketch.call(aten.mm.default, x, x), 2)
    read = sketch.call(operator.getitem, parts, 1)
    found = tagged(sketch, "selective", sketch.call(aten.sum.default, read, backward=True))
    assert found == {"mm": "save", "split": "recompute", "getitem": "recompute"}


def test_attention_as_a_higher_order_operator_is_heavy_and_may_run_twice_but_no_other_may() -> None:
    assert "flex_attention" in torch.ops.higher_order.flex_attention.name()
    sketch = Sketch()
    x = sketch.placeholder("x", N)
    for target, policy, expected in (
        (flex, "full", "recompute"),
        (flex, "selective", "save"),
        (torch.ops.higher_order.wrap, "full", "save"),
    ):
        sketch = Sketch()
        x = sketch.placeholder("x", N)
        node = sketch.call(aten.neg.default, x)
        node.target = target
        assert tagged(sketch, policy, node) == {node.name: expected}


@pytest.mark.parametrize(("length", "tag"), [(3, "recompute"), (2, "save")])
def test_a_batched_product_larger_than_its_factors_is_recomputed(length: int, tag: str) -> None:
    sketch = Sketch()
    q, k = sketch.placeholder("q", 2, length, 1), sketch.placeholder("k", 2, 1, length)
    weights = sketch.call(aten.neg.default, sketch.call(aten.bmm.default, q, k))
    found = tagged(sketch, "selective", sketch.call(aten.sum.default, weights, backward=True))
    assert found == {"neg": "recompute", "bmm": tag}


# -- what never runs twice ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_random_draw_is_saved_and_what_is_computed_from_it_is_not(policy: str) -> None:
    sketch = Sketch()
    draw = sketch.call(aten.bernoulli.default, sketch.placeholder("x", N))
    found = tagged(sketch, policy, sketch.call(aten.exp.default, draw))
    assert found == {"bernoulli": "save", "exp": "recompute"}


def test_readers_of_a_buffer_that_the_step_writes_are_saved_and_readers_of_another_are_not() -> None:
    sketch = Sketch()
    counts, bias = sketch.placeholder("counts", N), sketch.placeholder("bias", N)
    sketch.call(aten.add_.Tensor, counts, 1)
    written = sketch.call(aten.exp.default, sketch.call(aten.view.default, counts, [N]))
    constant = sketch.call(aten.exp.default, bias)
    found = tagged(sketch, "full", written, constant, sketch.call(aten.neg.default, written))
    assert found == {"exp": "save", "exp_1": "recompute", "neg": "recompute"}


def test_an_in_place_write_and_a_view_of_what_it_wrote_are_saved() -> None:
    sketch = Sketch()
    zeros = sketch.call(aten.zeros_like.default, sketch.placeholder("x", N))
    written = sketch.call(aten.add_.Tensor, zeros, 1)
    found = tagged(sketch, "full", written, sketch.call(aten.view.default, zeros, [N]))
    assert found == {"add_": "save", "view": "save"}


def test_a_value_whose_size_depends_on_data_is_saved() -> None:
    sketch = Sketch()
    with sketch.mode.shape_env.ignore_fresh_unbacked_symbols():
        rows = sketch.call(aten.nonzero.default, sketch.placeholder("x", N))
    found = tagged(sketch, "full", sketch.call(aten.sum.default, sketch.call(aten.neg.default, rows)))
    assert found == {"sum_1": "recompute", "neg": "recompute", "nonzero": "save"}


# -- what costs nothing -------------------------------------------------------------------------------


def test_a_size_that_backward_reads_off_an_activation_is_read_in_forward() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, N)
    product = sketch.call(aten.mm.default, x, sketch.placeholder("w", N, N))
    sketch.call(aten.neg.default, product)
    size = sketch.call(aten.sym_size.int, product, 0, backward=True)
    other = sketch.call(aten.sym_size.int, x, 0, backward=True)
    zeros = sketch.call(aten.new_zeros.default, x, [size, other], backward=True)
    assert tagged(sketch, "selective", zeros) == {}
    assert [node.name for node in sketch.graph.nodes][:5] == ["x", "w", "mm", "sym_size", "neg"]
    assert size.meta["origin"].direction == "forward"


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", {"_to_copy": "save"}), ("float64", {"mm": "save"})])
def test_a_smaller_value_is_saved_in_place_of_a_source_that_nothing_else_needs(
    dtype: str, expected: dict[str, str]
) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", N, N)
    view = sketch.call(aten.view.default, sketch.call(aten.mm.default, x, x), [N, N])
    cast = sketch.call(aten._to_copy.default, view, dtype=getattr(torch, dtype))
    found = tagged(sketch, "selective", sketch.call(aten.sum.default, cast, backward=True))
    assert {name: tag for name, tag in found.items() if tag == "save"} == expected


def test_a_larger_source_that_backward_reads_as_well_stays_saved() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", N, N)
    product = sketch.call(aten.mm.default, x, x)
    cast = sketch.call(aten._to_copy.default, product, dtype=torch.bfloat16)
    read = [sketch.call(aten.sum.default, value, backward=True) for value in (product, cast)]
    assert tagged(sketch, "selective", *read) == {"mm": "save", "_to_copy": "recompute"}


def test_a_value_that_another_saved_value_is_a_view_of_is_not_offloaded() -> None:
    for reads_view_elsewhere, expected in ((False, "offload"), (True, "save")):
        sketch = Sketch()
        x = sketch.placeholder("x", N, N)
        product = sketch.call(aten.mm.default, x, x)
        view = sketch.call(aten.t.default, product)
        if reads_view_elsewhere:
            sketch.call(aten.neg.default, view, at="layers.1")
        sketch.call(aten.ones.default, [N], at="layers.1", backward=True)
        read = [sketch.call(aten.sum.default, value, backward=True) for value in (product, view)]
        assert tagged(sketch, "offload", *read)["mm"] == expected


@pytest.mark.parametrize(("is_sent", "tag"), [(False, "offload"), (True, "save")])
def test_what_another_stage_of_a_pipeline_reads_is_not_offloaded_by_the_one_that_computed_it(
    is_sent: bool, tag: str
) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", N, N)
    product = sketch.call(aten.mm.default, x, x, at="layers.0")
    gradient = sketch.call(aten.mul.Tensor, product, x, at="layers.0", backward=True)
    sketch.graph.output([None, (product, gradient) if is_sent else (gradient,)])
    module = GraphModule({}, sketch.graph)
    tag_memory(module, context_with(sketch, "offload"), blocks="layers.*")
    assert tags(module)["mm"] == tag


@pytest.mark.parametrize("has_loss", [True, False])
def test_the_first_block_in_backward_is_offloaded_where_backward_does_not_follow_at_once(has_loss: bool) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", N, N)
    product = sketch.call(aten.mm.default, x, x, at="layers.0")
    loss = sketch.call(aten.sum.default, product, at="")
    gradient = sketch.call(aten.mul.Tensor, product, x, at="layers.0", backward=True)
    sketch.graph.output([loss if has_loss else None, gradient])
    module = GraphModule({}, sketch.graph)
    tag_memory(module, context_with(sketch, "offload"), blocks="layers.*")
    assert tags(module)["mm"] == ("save" if has_loss else "offload")
