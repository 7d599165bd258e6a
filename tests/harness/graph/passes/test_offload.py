"""Activations in host memory between forward and backward: where the copies stand, and that bits survive."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.errors import PassError
from bitproof.harness.graph import offload_operators
from bitproof.harness.graph.passes.offload import offload
from bitproof.harness.graph.passes.tag_memory import tag_memory
from bitproof.harness.graph.writer import CHUNK_KEY
from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    batch,
    copied,
    differing,
    listing,
    parameter,
    run_eager,
    run_graph,
    trace,
    verify,
)
from tests.harness.graph.memory_graphs import context_with, rewritten, two_blocks, with_policy
from tests.harness.graph.passes.chunk.test_chunk import Block


def test_copies_leave_after_the_last_use_and_come_back_a_block_ahead() -> None:
    blocks = two_blocks()
    context = context_with(blocks.sketch, "offload")
    module = rewritten(blocks.module, context)
    verify(module)
    assert context.facts["offloaded_nodes"] == 2
    assert listing(module) == [
        "neg = neg(x)",
        "mm = mm(neg, w)",
        "sin = sin(mm)",
        "mm_offload = offload(mm)",
        "t = t(sin)",
        "add = add(sin, neg)",
        "neg_offload = offload(neg)",
        "mm_1 = mm(add, w)",
        "sin_1 = sin(mm_1)",
        "t_1 = t(sin_1)",
        "add_1 = add(sin_1, add)",
        "sum_1 = sum(add_1)",
        "neg_host = wait_offload(neg_offload, neg)",
        "mm_host = wait_offload(mm_offload, mm)",
        "ones_like = ones_like(add_1)",
        "neg_reload = reload(neg_host, cpu)",
        "mm_reload = reload(mm_host, cpu)",
        "cos = cos(mm_1)",
        "mul = mul(ones_like, cos)",
        "sin_1_recomputed = sin(mm_1)",
        "t_1_recomputed = t(sin_1_recomputed)",
        "mm_2 = mm(mul, t_1_recomputed)",
        "mm_3 = mm(add, mm_2)",
        "mm_reloaded = wait_reload(mm_reload)",
        "cos_1 = cos(mm_reloaded)",
        "mul_1 = mul(mm_2, cos_1)",
        "sin_recomputed = sin(mm_reloaded)",
        "t_recomputed = t(sin_recomputed)",
        "mm_4 = mm(mul_1, t_recomputed)",
        "neg_reloaded = wait_reload(neg_reload)",
        "mm_5 = mm(neg_reloaded, mm_4)",
        "return [sum_1, mm_3, mm_5]",
    ]


def test_without_recomputation_backward_reads_the_copy_all_the_same() -> None:
    blocks = two_blocks()
    context = context_with(blocks.sketch, "offload")
    module = offload(tag_memory(blocks.module, context, blocks="layers.*"), context, blocks="layers.*")
    assert [line for line in listing(module) if "reloaded" in line] == [
        "mm_reloaded = wait_reload(mm_reload)",
        "cos_1 = cos(mm_reloaded)",
        "neg_reloaded = wait_reload(neg_reload)",
        "mm_5 = mm(neg_reloaded, mm_4)",
    ]


def test_a_graph_without_the_tag_comes_back_untouched() -> None:
    blocks = two_blocks()
    before = listing(blocks.module)
    context = context_with(blocks.sketch, "offload", offload_gib=0.0)
    assert listing(offload(blocks.module, context, blocks="layers.*")) == before
    assert context.facts == {"offloaded_nodes": 0, "deferred": {}, "prefetched": {}}


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({}, ["layers.1 forward", "layers.2 backward"]),
        ({"defer": 0, "prefetch": 0}, ["layers.0 forward", "layers.1 backward"]),
        ({"defer": 2}, ["layers.2 forward", "layers.2 backward"]),
        ({"defer": 4, "prefetch": 2}, ["layers.4 forward", "layers.3 backward"]),
        ({"prefetch": 3}, ["layers.1 forward", "layers.4 backward"]),
        ({"prefetch": 4}, ["layers.1 forward", "layers.4 forward"]),
    ],
)
def test_a_copy_leaves_while_the_next_blocks_run_and_comes_back_while_those_after_run_backward(
    settings: dict[str, int], places: list[str]
) -> None:
    """Of five blocks: where the first activation of layers.0 is awaited, and where its copy back starts."""
    module, _ = with_policy(trace(five_blocks()), "offload", **settings)
    first = next(node for node in module.graph.nodes if node.target is offload_operators.OFFLOAD)
    host = next(iter(first.users))
    reload = next(user for user in host.users if user.target is offload_operators.RELOAD)
    reloaded = next(iter(reload.users))
    blocks = [_block_before(node) for node in (first, host, reload, reloaded)]
    assert blocks == ["layers.0 forward", places[0], places[1], "layers.1 backward"]


def five_blocks() -> Layers:
    return Layers(*(Applied(lambda m, x: (x @ m.w).sin(), w=parameter(D, D)) for _ in range(5)))


@pytest.mark.parametrize("depths", [(0, 0), (0, 4), (4, 0), (2, 3), (4, 4)])
def test_every_depth_keeps_the_bits_of_eager(depths: tuple[int, int]) -> None:
    model = five_blocks()
    joint = trace(model)
    module, _ = with_policy(joint, "offload", prefetch=depths[0], defer=depths[1])
    assert not differing(run_graph(module, joint, model, batch()), run_eager(model, batch(), None))


def test_the_report_has_how_many_copies_got_which_depth() -> None:
    """Four products and, a block later, three sines: the products of layers.0 and layers.1 have three blocks left."""
    _, reports = with_policy(trace(five_blocks()), "offload", prefetch=2, defer=3)
    facts = {report.name: report.facts for report in reports}["offload"]
    assert facts == {
        "offloaded_nodes": 7,
        "deferred": {"1": 2, "2": 2, "3": 3},
        "prefetched": {"1": 2, "2": 5},
    }


@pytest.mark.parametrize(("name", "half"), [("prefetch", "backward"), ("defer", "forward")])
def test_a_depth_that_no_two_blocks_have_is_refused(name: str, half: str) -> None:
    joint = trace(five_blocks())
    with_policy(copied(joint), "offload", **{name: 4})
    with pytest.raises(PassError) as refused:
        with_policy(joint, "offload", **{name: 5})
    assert str(refused.value) == (
        f"PassError: memory.{name} is deeper than the graph\n"
        f"  expected: at most 4, as the graph has 5 blocks in {half}\n"
        f"  found: {name}=5\n"
        "  came from: pass offload\n"
        "  fix: choose fewer blocks, or a model with more layers"
    )


def _block_before(node: torch.fx.Node) -> str:
    """The module and direction of the last call before `node` that is no copy."""
    node = node.prev
    while getattr(node.target, "namespace", None) == "bitproof" or node.meta["origin"].module in (None, ""):
        node = node.prev
    origin = node.meta["origin"]
    return f"{origin.module} {origin.direction}"


def test_where_a_module_runs_once_a_chunk_so_do_its_copies() -> None:
    model, x = Layers(Block(), Block(), Block()), batch()
    joint = trace(model, x)
    module, _ = with_policy(joint, "offload", "layers.*")
    chunks: dict[str, list[int | None]] = {}
    for node in module.graph.nodes:
        if getattr(node.target, "namespace", None) == "bitproof":
            chunks.setdefault(node.name.rsplit("_chunk", 1)[0], []).append(node.meta.get(CHUNK_KEY))
    assert chunks and all(found in ([0, 1], [None]) for found in chunks.values())
    assert sum(found == [0, 1] for found in chunks.values()) > 20
    assert not differing(run_graph(module, joint, model, x), run_eager(model, x, "layers.*"))


def test_the_value_itself_is_not_read_after_its_copy_is_there() -> None:
    blocks = two_blocks()
    module = rewritten(blocks.module, context_with(blocks.sketch, "offload"))
    order = list(module.graph.nodes)
    for node in order:
        if node.target is offload_operators.WAIT_OFFLOAD:
            value = node.args[1]
            assert max(order.index(user) for user in value.users) == order.index(node)
