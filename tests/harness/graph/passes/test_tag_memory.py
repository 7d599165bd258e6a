"""Which activations are saved, recomputed and offloaded under each policy, and what never runs twice."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as flex
from torch.fx import GraphModule, Node

from bitproof.harness.errors import PassError
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


# -- a list of operators ------------------------------------------------------------------------------


def products(sketch: Sketch, num: int, at: str = "layers.0") -> list[Node]:
    """Products, each of the one before."""
    found = [sketch.placeholder(f"of_{at.replace('.', '_')}", N, N)]
    for _ in range(num):
        found.append(sketch.call(aten.mm.default, found[-1], found[0], at=at))
    return found[1:]


def read_as_cos(sketch: Sketch, nodes: list[Node]) -> list[Node]:
    return [sketch.call(aten.cos.default, node, backward=True) for node in nodes]


@pytest.mark.parametrize(
    ("entry", "saved"),
    [("mm", "mm mm_1 mm_2 mm_3 mm_4"), ("mm/2", "mm mm_2 mm_4"), ("mm/3", "mm mm_3"), ("mm/9", "mm")],
)
def test_a_listed_operator_is_saved_or_its_first_call_of_every_so_many(entry: str, saved: str) -> None:
    sketch = Sketch()
    found = tagged(sketch, "selective", *read_as_cos(sketch, products(sketch, 5)), save=(entry,))
    assert [name for name, tag in found.items() if tag == "save"] == saved.split()
    assert len(found) == 5


def test_calls_are_counted_in_each_block() -> None:
    sketch = Sketch()
    of_blocks = [*products(sketch, 3, "layers.0"), *products(sketch, 2, "layers.1.moe")]
    found = tagged(sketch, "selective", *read_as_cos(sketch, of_blocks), save=("mm/2",))
    assert [tag for tag in found.values()] == ["save", "recompute", "save", "save", "recompute"]


def test_what_is_not_listed_is_recomputed_though_it_is_heavy_and_a_listed_view_or_sum_is_saved() -> None:
    sketch = Sketch()
    [product] = products(sketch, 1)
    cosine, view = sketch.call(aten.cos.default, product), sketch.call(aten.t.default, product)
    read = read_as_cos(sketch, [product, cosine, view])
    assert tagged(sketch, "selective", *read, save=("cos",)) == {"mm": "recompute", "cos": "save", "t": "recompute"}
    sketch = Sketch()
    [product] = products(sketch, 1)
    read = read_as_cos(sketch, [sketch.call(aten.t.default, product)])
    assert tagged(sketch, "selective", *read, save=("t",)) == {"t": "save"}


def test_attention_and_a_collective_are_listed_by_name_and_bring_their_parts_and_waits() -> None:
    sketch = Sketch()
    q, x = sketch.placeholder("q", 2, 2, N, N), sketch.placeholder("x", N)
    attention = sketch.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    rows = sketch.call(c10d.wait_tensor.default, sketch.call(c10d.all_gather_into_tensor.default, x, 2, "fsdp"))
    part = sketch.call(operator.getitem, attention, 0)
    read = [sketch.call(aten.sum.default, value, backward=True) for value in (part, rows)]
    for save, tags_of in (
        (("attention",), {"getitem": "save", "all_gather_into_tensor": "recompute", "wait_tensor": "recompute"}),
        (("all_gather_into_tensor",), {"getitem": "recompute", "wait_tensor": "save"}),
    ):
        module = GraphModule({}, sketch.graph)
        for node in module.graph.nodes:
            node.meta.pop("memory", None)
        if not module.graph.find_nodes(op="output"):
            sketch.finish(*read)
        tag_memory(module, context_with(sketch, "selective", save=save), blocks="layers.*")
        found = tags(module)
        assert {name: found.get(name) for name in tags_of} == tags_of


def test_what_must_not_run_twice_and_what_enters_a_block_are_saved_whatever_the_list_says() -> None:
    sketch = Sketch()
    draw = sketch.call(aten.bernoulli.default, sketch.placeholder("x", N))
    entering = sketch.call(aten.exp.default, draw)
    sketch.call(aten.neg.default, entering, at="layers.1")
    read = [sketch.call(aten.mul.Tensor, draw, entering, backward=True)]
    assert tagged(sketch, "selective", *read, save=()) == {"bernoulli": "save", "exp": "save"}


def test_the_list_says_what_offload_may_move() -> None:
    sketch = Sketch()
    nodes = products(sketch, 3)
    sketch.call(aten.ones.default, [N], at="layers.1", backward=True)
    found = tagged(sketch, "offload", *read_as_cos(sketch, nodes), save=("mm/2",))
    assert list(found.values()) == ["offload", "recompute", "offload"]


def test_the_report_has_the_number_of_calls_of_each_entry() -> None:
    blocks = two_blocks()
    context = context_with(blocks.sketch, "selective", save=("mm/2", "sin"))
    tag_memory(blocks.module, context, blocks="layers.*")
    assert context.facts["listed"] == {"mm/2": 2, "sin": 2}


def test_an_operator_that_no_block_calls_in_forward_is_refused_with_the_names_of_those_that_are() -> None:
    blocks = two_blocks()
    before = listing(blocks.module)
    for entry in ("all_to_all_single/2", "neg", "ones_like"):
        with pytest.raises(PassError) as refused:
            tag_memory(blocks.module, context_with(blocks.sketch, "selective", save=("mm", entry)), blocks="layers.*")
        assert str(refused.value) == (
            f"PassError: memory.save lists an operator that no block calls in forward: {entry}\n"
            "  expected: operators without namespace and overload, such as mm\n"
            f"  found: save=('mm', '{entry}')\n"
            "  fix: leave it out, or list an operator of the blocks"
        )
    assert tags(blocks.module) == {} and listing(blocks.module) == before


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
