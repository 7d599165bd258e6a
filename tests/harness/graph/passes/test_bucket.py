"""A block's gathers become one, and so do its reductions: the graph's text, its bits, and what stays alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from bitproof.harness.case import Parallelism
from bitproof.harness.errors import PassError
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.groups import Group, GroupTable
from bitproof.harness.graph.origin import RECOMPUTED_KEY
from bitproof.harness.graph.passes.bucket import bucket
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.reference.parallel.mesh import Mesh, ensure_group
from tests.harness.graph.graphs import Sketch, bits, calls, listing, names, verify
from tests.ranks import on_ranks

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
F32, BF16 = torch.float32, torch.bfloat16
W = 2
RANKS = ((0, 1),)


def gather(
    sketch: Sketch,
    shard: Node,
    at: str,
    *,
    dtype: torch.dtype | None = BF16,
    group: str = "fsdp",
    backward: bool = False,
) -> Node:
    """The full parameter of a shard, in `dtype`; None gathers the shard as it is."""
    cast = shard if dtype is None else sketch.call(aten._to_copy.default, shard, dtype=dtype, at=at, backward=backward)
    launch = sketch.call(c10d.all_gather_into_tensor.default, cast, W, group, at=at, backward=backward)
    wait = sketch.call(c10d.wait_tensor.default, launch, at=at, backward=backward)
    if backward:
        for node in (cast, launch, wait):
            node.meta[RECOMPUTED_KEY] = True
    return wait


def reduce(
    sketch: Sketch, gradient: Node, at: str, *, dtype: torch.dtype = F32, group: str = "fsdp", chunk: int | None = None
) -> Node:
    """This rank's rows of a gradient, reduced in `dtype`."""
    before = set(sketch.graph.nodes)
    cast = sketch.call(aten._to_copy.default, gradient, dtype=dtype, at=at, backward=True)
    launch = sketch.call(c10d.reduce_scatter_tensor.default, cast, "sum", W, group, at=at, backward=True)
    wait = sketch.call(c10d.wait_tensor.default, launch, at=at, backward=True)
    if dtype is not F32:
        wait = sketch.call(aten._to_copy.default, wait, dtype=F32, at=at, backward=True)
    for node in sketch.graph.nodes:
        if chunk is not None and node not in before:
            node.meta[CHUNK_KEY] = chunk
    return wait


def context_of(sketch: Sketch, *groups: str) -> PassContext:
    table = {name: Group(name, RANKS) for name in groups or ("fsdp", "efsdp")}
    return replace(sketch.context(), groups=GroupTable(table))


def bucketed(sketch: Sketch, *outputs: Node, join_chunks: bool = True) -> GraphModule:
    module = bucket(sketch.finish(*outputs), context_of(sketch), blocks="layers.*", join_chunks=join_chunks)
    verify(module)
    return module


def collectives(module: GraphModule) -> list[str]:
    return [line for line in listing(module) if "all_gather_into_tensor(" in line or "reduce_scatter_tensor(" in line]


def two_layers(**options: Any) -> Callable[[], tuple[Sketch, list[Node]]]:
    """A step over three parameters of layers.0 (one of them an expert's), one of layers.1 and one outside."""

    def build() -> tuple[Sketch, list[Node]]:
        sketch = Sketch()
        a = sketch.placeholder("a", 2, 3)
        b = sketch.placeholder("b", 5)
        e = sketch.placeholder("e", 1, 2, 2)
        c = sketch.placeholder("c", 2, 2)
        head = sketch.placeholder("head", 4)
        full_b = gather(sketch, b, "layers.0.norm")
        x = sketch.call(aten.sin.default, full_b, at="layers.0")
        full_a = gather(sketch, a, "layers.0.attention")
        full_e = gather(sketch, e, "layers.0.moe", group="efsdp")
        y = sketch.call(aten.mul.Tensor, full_a, 3, at="layers.0")
        full_c = gather(sketch, c, "layers.1")
        full_head = gather(sketch, head, "head")
        loss = sketch.call(aten.sum.default, sketch.call(aten.exp.default, full_head, at=""), at="")
        back = {"backward": True}
        g_head = reduce(sketch, sketch.call(aten.cos.default, full_head, at="head", **back), "head", **options)
        g_c = reduce(sketch, sketch.call(aten.cos.default, full_c, at="layers.1", **back), "layers.1", **options)
        g_a = reduce(sketch, sketch.call(aten.cos.default, y, at="layers.0", **back), "layers.0.attention", **options)
        g_e = sketch.call(aten.cos.default, full_e, at="layers.0", **back)
        g_e = reduce(sketch, g_e, "layers.0.moe", group="efsdp", **options)
        g_b = reduce(sketch, sketch.call(aten.cos.default, x, at="layers.0", **back), "layers.0.norm", **options)
        return sketch, [loss, g_a, g_b, g_e, g_c, g_head]

    return build


def assert_same_bits(build: Callable[[], tuple[Sketch, list[Node]]], **settings: Any) -> GraphModule:
    """The step gives the same bits on two ranks with and without bucketing; returns the bucketed graph."""
    sketch, outputs = build()
    plain = sketch.finish(*outputs)
    sketch, outputs = build()
    module = bucketed(sketch, *outputs, **settings)
    shapes = [node.meta["val"] for node in plain.graph.nodes if node.op == "placeholder"]

    def body(mesh: Mesh) -> list[bool]:
        for name in ("fsdp.reduce", "efsdp.reduce"):
            ensure_group(name, RANKS)
        generator = torch.Generator().manual_seed(mesh.rank)
        inputs = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in shapes]
        first, second = plain(*inputs), module(*inputs)
        return [torch.equal(bits(x), bits(y)) and x.shape == y.shape for x, y in zip(first, second, strict=True)]

    assert on_ranks(Parallelism(world_size=W, ep=1), body) == [[True] * len(outputs)] * W
    return module


# -- the text -----------------------------------------------------------------------------------------


def test_a_block_gathers_once_and_reduces_once_in_registration_order() -> None:
    sketch = Sketch()
    a, b = sketch.placeholder("a", 2, 3), sketch.placeholder("b", 5)
    full_b = gather(sketch, b, "layers.0.norm")
    x = sketch.call(aten.sin.default, full_b)
    full_a = gather(sketch, a, "layers.0.attention")
    y = sketch.call(aten.sin.default, full_a)
    g_a = reduce(sketch, sketch.call(aten.cos.default, y, backward=True), "layers.0.attention")
    g_b = reduce(sketch, sketch.call(aten.cos.default, x, backward=True), "layers.0.norm")
    assert listing(bucketed(sketch, x, g_a, g_b)) == [
        "_to_copy = _to_copy(b, dtype=torch.bfloat16)",
        "_to_copy_1 = _to_copy(a, dtype=torch.bfloat16)",
        "reshape_default = reshape(_to_copy_1, [-1])",
        "reshape_default_1 = reshape(_to_copy, [-1])",
        "cat_default = cat([reshape_default, reshape_default_1])",
        "all_gather_into_tensor_default = all_gather_into_tensor(cat_default, 2, fsdp)",
        "wait_tensor_default = wait_tensor(all_gather_into_tensor_default)",
        "view_default = view(wait_tensor_default, [-1, 11])",
        "split_with_sizes_copy_default = split_with_sizes_copy(view_default, [6, 5], 1)",
        "getitem = getitem(split_with_sizes_copy_default, 0)",
        "view_default_1 = view(getitem, [4, 3])",
        "getitem_1 = getitem(split_with_sizes_copy_default, 1)",
        "view_default_2 = view(getitem_1, [10])",
        "sin = sin(view_default_2)",
        "sin_1 = sin(view_default_1)",
        "cos = cos(sin_1)",
        "_to_copy_2 = _to_copy(cos, dtype=torch.float32)",
        "cos_1 = cos(sin)",
        "_to_copy_3 = _to_copy(cos_1, dtype=torch.float32)",
        "reshape_default_2 = reshape(_to_copy_2, [2, -1])",
        "reshape_default_3 = reshape(_to_copy_3, [2, -1])",
        "cat_default_1 = cat([reshape_default_2, reshape_default_3], 1)",
        "reduce_scatter_tensor_default = reduce_scatter_tensor(cat_default_1, sum, 2, fsdp.reduce)",
        "wait_tensor_default_1 = wait_tensor(reduce_scatter_tensor_default)",
        "split_with_sizes_default = split_with_sizes(wait_tensor_default_1, [6, 5], 1)",
        "getitem_2 = getitem(split_with_sizes_default, 0)",
        "view_default_3 = view(getitem_2, [2, 3])",
        "getitem_3 = getitem(split_with_sizes_default, 1)",
        "view_default_4 = view(getitem_3, [5])",
        "return [sin, view_default_3, view_default_4]",
    ]


def test_blocks_groups_and_modules_outside_blocks_have_buckets_of_their_own_launched_one_ahead() -> None:
    sketch, outputs = two_layers()()
    module = bucketed(sketch, *outputs)
    order = [
        (node.name, node.args[-1], str(node.meta["origin"]))
        for node in calls(module, "all_gather_into_tensor", "reduce_scatter_tensor")
    ]
    assert order == [
        ("all_gather_into_tensor_default", "fsdp", "layers.0 (forward)"),
        ("all_gather_into_tensor_2", "efsdp", "layers.0.moe (forward)"),
        ("all_gather_into_tensor_3", "fsdp", "layers.1 (forward)"),
        ("all_gather_into_tensor_4", "fsdp", "head (forward)"),
        ("reduce_scatter_tensor", "fsdp.reduce", "head (backward)"),
        ("reduce_scatter_tensor_1", "fsdp.reduce", "layers.1 (backward)"),
        ("reduce_scatter_tensor_3", "efsdp.reduce", "layers.0.moe (backward)"),
        ("reduce_scatter_tensor_default", "fsdp.reduce", "layers.0 (backward)"),
    ]
    flow = names(module, "all_gather_into_tensor", "wait_tensor", "reduce_scatter_tensor")
    assert flow[:8] == [
        "all_gather_into_tensor_default",
        "all_gather_into_tensor_2",
        "wait_tensor_default",
        "all_gather_into_tensor_3",
        "wait_tensor_2",
        "all_gather_into_tensor_4",
        "wait_tensor_3",
        "wait_tensor_4",
    ]
    assert flow[8:] == [
        "reduce_scatter_tensor",
        "wait_tensor_5",
        "reduce_scatter_tensor_1",
        "wait_tensor_6",
        "reduce_scatter_tensor_3",
        "wait_tensor_8",
        "reduce_scatter_tensor_default",
        "wait_tensor_default_1",
    ]


@pytest.mark.parametrize("outside, num_buckets", [("layers.0.b", 1), ("layers.1.a", 2), ("tables.0.b", 2)])
def test_only_parameters_of_one_block_share_a_bucket(outside: str, num_buckets: int) -> None:
    sketch = Sketch()
    at = "tables.0.a" if outside.startswith("tables") else "layers.0.a"
    fulls = [gather(sketch, sketch.placeholder(name, 2), module) for name, module in (("a", at), ("b", outside))]
    assert len(collectives(bucketed(sketch, fulls[0], *fulls))) == num_buckets


def test_gradients_of_two_dtypes_are_reduced_apart() -> None:
    sketch = Sketch()
    a, b = sketch.placeholder("a", 2), sketch.placeholder("b", 2)
    full = sketch.placeholder("full", 4)
    outputs = [reduce(sketch, full, "layers.0", dtype=dtype) for dtype in (F32, BF16)]
    assert (a, b) and len(collectives(bucketed(sketch, full, *outputs))) == 2


@pytest.mark.parametrize("operation, num_buckets", [("sum", 1), ("avg", 2)])
def test_sums_and_means_are_reduced_apart(operation: str, num_buckets: int) -> None:
    sketch = Sketch()
    a, b, full = (sketch.placeholder(name, size) for name, size in (("a", 2), ("b", 2), ("full", 4)))
    outputs = [reduce(sketch, full, "layers.0") for _ in (a, b)]
    launch = next(node for node in sketch.graph.nodes if node.name == "reduce_scatter_tensor")
    launch.args = (launch.args[0], operation, *launch.args[2:])
    assert len(collectives(bucketed(sketch, full, *outputs))) == num_buckets


def chunked_gradients() -> tuple[Sketch, list[Node]]:
    """Two parameters of one layer, each with a gradient a chunk, reduced and then added."""
    sketch = Sketch()
    sketch.placeholder("a", 2)
    sketch.placeholder("b", 3)
    x, y = sketch.placeholder("x", 4), sketch.placeholder("y", 6)
    parts = [[reduce(sketch, g, "layers.0", chunk=chunk) for g in (x, y)] for chunk in (0, 1)]
    sums = [sketch.call(aten.add.Tensor, *pair, backward=True) for pair in zip(*parts, strict=True)]
    return sketch, [x, *sums]


@pytest.mark.ranks
def test_the_chunks_of_a_gradient_are_reduced_together() -> None:
    module = assert_same_bits(chunked_gradients)
    assert len(collectives(module)) == 1
    (split,) = calls(module, "split_with_sizes")
    assert split.args[1] == [2, 2, 3, 3]


@pytest.mark.ranks
def test_or_each_chunk_by_itself() -> None:
    module = assert_same_bits(chunked_gradients, join_chunks=False)
    assert len(collectives(module)) == 2
    assert [node.args[1] for node in calls(module, "split_with_sizes")] == [[2, 3], [2, 3]]
    assert [node.meta[CHUNK_KEY] for node in calls(module, "reduce_scatter_tensor")] == [0, 1]


# -- the bits -----------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_two_layers_give_the_same_bits(dtype: torch.dtype) -> None:
    assert_same_bits(two_layers(dtype=dtype))


def uneven() -> tuple[Sketch, list[Node]]:
    """Three rows on two ranks: a padded shard, cut after its gather; its gradient padded before its reduction."""
    sketch = Sketch()
    shards = [sketch.placeholder("a", 2, 3), sketch.placeholder("b", 2)]
    fulls = [sketch.call(aten.slice.Tensor, gather(sketch, shard, "layers.0"), 0, 0, 3) for shard in shards]
    loss = sketch.call(aten.sum.default, fulls[0])
    gradients = []
    for full, pad in zip(fulls, ([0, 0, 0, 1], [0, 1]), strict=True):
        padded = sketch.call(aten.constant_pad_nd.default, sketch.call(aten.cos.default, full), pad, backward=True)
        gradients.append(reduce(sketch, padded, "layers.0"))
    return sketch, [loss, *gradients]


@pytest.mark.ranks
def test_uneven_shards_are_padded_and_cut_as_before() -> None:
    assert len(collectives(assert_same_bits(uneven))) == 2


def padded_in_the_graph() -> tuple[Sketch, list[Node]]:
    """The same, but a shard is stored without its padding row, which the graph adds, and cuts off its gradient."""
    sketch = Sketch()
    shards = [sketch.placeholder("a", 1, 3), sketch.placeholder("b", 2, 3)]
    padded = sketch.call(aten.constant_pad_nd.default, shards[0], [0, 0, 0, 1])
    fulls = [gather(sketch, x, "layers.0") for x in (padded, shards[1])]
    gradients = [reduce(sketch, sketch.call(aten.cos.default, full, backward=True), "layers.0") for full in fulls]
    cut = sketch.call(aten.slice.Tensor, gradients[0], 0, 0, 1, backward=True)
    return sketch, [sketch.call(aten.sum.default, fulls[0]), cut, gradients[1]]


@pytest.mark.ranks
def test_shards_may_be_padded_and_gradients_cut_in_the_graph() -> None:
    assert len(collectives(assert_same_bits(padded_in_the_graph))) == 2


def turned() -> tuple[Sketch, list[Node]]:
    """A gradient that is not contiguous, beside one that is."""
    sketch = Sketch()
    sketch.placeholder("a", 1, 3)
    sketch.placeholder("b", 3)
    x, y = sketch.placeholder("x", 3, 2), sketch.placeholder("y", 6)
    return sketch, [y, reduce(sketch, sketch.call(aten.t.default, x), "layers.0"), reduce(sketch, y, "layers.0")]


@pytest.mark.ranks
def test_a_gradient_that_is_not_contiguous_is_sent_row_by_row() -> None:
    """torch 2.11 sends none that is not contiguous, as it says itself: neither eager code nor a graph has one there."""
    if torch.__version__.startswith("2.11."):
        with pytest.raises(AssertionError, match=r"RuntimeError: Expected input\.is_contiguous\(\) to be true"):
            assert_same_bits(turned)
    else:
        assert len(collectives(assert_same_bits(turned))) == 1


# -- the same parameter, gathered again ---------------------------------------------------------------


def gathered_twice(first: torch.dtype | None, second: torch.dtype | None, **options: Any) -> Callable[[], Any]:
    def build() -> tuple[Sketch, list[Node]]:
        sketch = Sketch()
        shard = sketch.placeholder("a", 2)
        x = sketch.call(aten.sin.default, gather(sketch, shard, "layers.0", dtype=first))
        y = sketch.call(aten.cos.default, gather(sketch, shard, "layers.1", dtype=second, **options))
        return sketch, [x, y]

    return build


@pytest.mark.ranks
def test_two_gathers_of_one_cast_become_one_gather_of_the_cast_value() -> None:
    module = assert_same_bits(gathered_twice(BF16, BF16))
    assert listing(module) == [
        "_to_copy = _to_copy(a, dtype=torch.bfloat16)",
        "all_gather_into_tensor = all_gather_into_tensor(_to_copy, 2, fsdp)",
        "wait_tensor = wait_tensor(all_gather_into_tensor)",
        "sin = sin(wait_tensor)",
        "cos = cos(wait_tensor)",
        "return [sin, cos]",
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("second", [None, F32])
def test_a_shard_gathered_as_bfloat16_and_as_float32_stays_two_gathers(second: torch.dtype | None) -> None:
    module = assert_same_bits(gathered_twice(BF16, second))
    dtypes = [node.meta["val"].dtype for node in calls(module, "all_gather_into_tensor")]
    assert dtypes == [BF16, F32]


@pytest.mark.ranks
def test_two_groups_gather_one_shard_twice() -> None:
    assert len(collectives(assert_same_bits(gathered_twice(BF16, BF16, group="efsdp")))) == 2


@pytest.mark.ranks
def test_a_gather_that_backward_repeats_is_kept() -> None:
    module = assert_same_bits(gathered_twice(BF16, BF16, backward=True))
    assert [bool(node.meta.get(RECOMPUTED_KEY)) for node in calls(module, "all_gather_into_tensor")] == [False, True]


def test_gathers_that_backward_repeats_have_buckets_among_themselves() -> None:
    sketch = Sketch()
    shards = [sketch.placeholder(name, 2) for name in "ab"]
    forward = [gather(sketch, shard, "layers.0") for shard in shards]
    backward = [gather(sketch, shard, "layers.0", backward=True) for shard in shards]
    module = bucketed(sketch, *(sketch.call(aten.sin.default, x) for x in (*forward, *backward)))
    launches = calls(module, "all_gather_into_tensor")
    assert [node.meta.get(RECOMPUTED_KEY) for node in launches] == [None, True]
    assert [node.meta["val"].numel() for node in launches] == [8, 8]


# -- what stays alone ---------------------------------------------------------------------------------


def test_a_graph_without_sharded_parameters_comes_back_untouched() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    y = sketch.call(c10d.all_to_all_single.default, x, [2, 2], [2, 2], "fsdp")
    module = sketch.finish(sketch.call(c10d.wait_tensor.default, y))
    nodes = list(module.graph.nodes)
    context = context_of(sketch)
    assert bucket(module, context, blocks="layers.*") is module
    assert list(module.graph.nodes) == nodes
    assert context.groups.made() == {}


def test_gathers_and_reductions_of_activations_stay_alone() -> None:
    sketch = Sketch()
    a, b = sketch.placeholder("a", 2), sketch.placeholder("b", 2)
    fulls = [gather(sketch, sketch.call(aten.sin.default, x), "layers.0") for x in (a, b)]
    cut = [sketch.call(aten.sin.default, reduce(sketch, full, "layers.0")) for full in fulls]
    before = listing(sketch.finish(fulls[0], *cut))
    assert listing(bucket(GraphModule({}, sketch.graph), context_of(sketch), blocks="layers.*")) == before


def test_a_parameter_that_the_graph_writes_to_is_gathered_where_it_was() -> None:
    def build(writes: bool) -> int:
        sketch = Sketch()
        a, b = sketch.placeholder("a", 2), sketch.placeholder("b", 2)
        first = gather(sketch, a, "layers.0")
        if writes:
            sketch.call(aten.add_.Tensor, b, 1)
        return len(collectives(bucketed(sketch, first, first, gather(sketch, b, "layers.0"))))

    assert (build(writes=False), build(writes=True)) == (1, 2)


def test_the_report_says_how_many_collectives_became_how_many() -> None:
    sketch, outputs = two_layers()()
    context = context_of(sketch)
    bucket(sketch.finish(*outputs), context, blocks="layers.*")
    assert context.facts == {"all_gathers": {"before": 5, "after": 4}, "reduce_scatters": {"before": 5, "after": 4}}
    assert context.groups.made() == {name: Group(name, RANKS) for name in ("fsdp.reduce", "efsdp.reduce")}


def test_a_reduction_over_an_unknown_group_is_refused() -> None:
    sketch, outputs = two_layers()()
    with pytest.raises(PassError) as error:
        bucket(sketch.finish(*outputs), context_of(sketch, "efsdp"), blocks="layers.*")
    assert str(error.value) == (
        "PassError: the graph names an unknown process group: fsdp\n"
        "  expected: one of efsdp\n"
        "  found: fsdp\n"
        "  fix: list the group in the context's table of groups"
    )
