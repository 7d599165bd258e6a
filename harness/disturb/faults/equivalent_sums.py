"""Rewrites of sums over tensor-parallel ranks, in chunks, that keep every bit. bitproof must report no difference."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from bitproof.harness.disturb import entry
from bitproof.harness.disturb.entry import Need, Site

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import Call, GraphEditor

SUMS_IN_CHUNKS = Need(
    lambda case: case.parallelism.tp > 1 and case.chunking is not None and not case.parallelism.sequence,
    "chunks whose sums over tensor ranks are all-reduces",
)

row = functools.partial(entry.row, family="equivalent", needs=(SUMS_IN_CHUNKS,))
EXACT = "ours: exact arithmetic, element by element"


def _tensor_sum(g: GraphEditor, direction: str = "forward") -> tuple[Call, Call]:
    node = g.find("all_reduce", direction=direction, where=lambda node: node.args[-1] == "tp")
    return node, g.wait_of(node)


def _scattered_and_gathered(g: GraphEditor, direction: str) -> list[Site]:
    node, wait = _tensor_sum(g, direction)
    size, group, ops = g.case.parallelism.tp, node.args[2], "_c10d_functional"
    # Flat, so that the ranks divide the first dim of any tensor.
    flat = g.make_before(node, "aten.reshape.default", node.args[0], [-1])
    own = g.make_before(node, f"{ops}.reduce_scatter_tensor.default", flat, "sum", size, group)
    # At the old wait: the gather reads the sum, which must be complete before.
    own = g.make_before(wait, f"{ops}.wait_tensor.default", own)
    whole = g.make_before(wait, f"{ops}.all_gather_into_tensor.default", own, size, group)
    whole = g.make_before(wait, f"{ops}.wait_tensor.default", whole)
    g.instead(wait, "aten.reshape.default", whole, list(g.value(node).shape))
    g.graph.erase_node(node)
    return []


@row("Megatron-LM: an all-reduce is a reduce-scatter and an all-gather")
def tensor_sum_scattered_and_gathered(g: GraphEditor) -> list[Site]:
    """a chunk's sum over tensor ranks is scattered, then gathered."""
    return _scattered_and_gathered(g, "forward")


@row("Megatron-LM: the same in backward")
def tensor_gradient_scattered_and_gathered(g: GraphEditor) -> list[Site]:
    """a chunk's gradient is reduce-scattered over tensor ranks, then gathered."""
    return _scattered_and_gathered(g, "backward")


@row("ours: ranks add what they gather")
def tensor_sum_of_gathered_parts(g: GraphEditor) -> list[Site]:
    """every rank gathers a chunk's partial sums and adds them in rank order."""
    node, wait = _tensor_sum(g)
    size = g.case.parallelism.tp
    # The leading dim of 1 becomes a dim of ranks when the parts are gathered.
    flat = g.make_before(node, "aten.reshape.default", node.args[0], [1, -1])
    all_parts = g.make_before(node, "_c10d_functional.all_gather_into_tensor.default", flat, size, node.args[2])
    all_parts = g.make_before(wait, "_c10d_functional.wait_tensor.default", all_parts)
    first, *others = (g.make_before(wait, "aten.select.int", all_parts, 0, rank) for rank in range(size))
    # In rank order, as the group would add them.
    for other in others:
        first = g.make_before(wait, "aten.add.Tensor", first, other)
    g.instead(wait, "aten.reshape.default", first, list(g.value(node).shape))
    g.graph.erase_node(node)
    return []


@row(EXACT)
def tensor_sum_in_two_parts(g: GraphEditor) -> list[Site]:
    """a chunk's sum over tensor ranks is taken in two parts, then joined."""
    node, wait = _tensor_sum(g)
    rows, summed = int(g.value(node).shape[0]), []
    for first, end in ((0, rows // 2), (rows // 2, rows)):
        # Launches come before the old launch and waits before the old wait, so both parts are in flight together.
        part = g.make_before(node, "aten.slice.Tensor", node.args[0], 0, first, end)
        part = g.make_before(node, "_c10d_functional.all_reduce.default", part, *node.args[1:])
        summed.append(g.make_before(wait, "_c10d_functional.wait_tensor.default", part))
    g.instead(wait, "aten.cat.default", summed)
    g.graph.erase_node(node)
    return []


@row(EXACT)
def tensor_sum_flattened(g: GraphEditor) -> list[Site]:
    """a chunk's partial sums are flattened for the all-reduce and reshaped back."""
    node, wait = _tensor_sum(g)
    g.before(node, node.args[0], "aten.reshape.default", [-1])
    g.after(wait, "aten.reshape.default", list(g.value(node).shape))
    return []


@row(EXACT)
def tensor_sum_transposed(g: GraphEditor) -> list[Site]:
    """a chunk's partial sums are transposed for the all-reduce and transposed back."""
    node, wait = _tensor_sum(g)
    turned = g.before(node, node.args[0], "aten.transpose.int", 0, -1)
    # Collectives take contiguous tensors only.
    g.before(node, turned, "aten.contiguous.default")
    # Contiguous again, as the result of the all-reduce was.
    g.after(g.after(wait, "aten.transpose.int", 0, -1), "aten.contiguous.default")
    return []


@row(EXACT)
def tensor_sum_doubled_and_halved(g: GraphEditor) -> list[Site]:
    """tensor ranks double a chunk's partial sums before the all-reduce and halve the sum."""
    node, wait = _tensor_sum(g)
    g.before(node, node.args[0], "aten.mul.Scalar", 2.0)
    g.after(wait, "aten.mul.Scalar", 0.5)
    return []


@row("ours: only time differs")
def late_for_a_tensor_sum(g: GraphEditor) -> list[Site]:
    """the last rank is late for a chunk's sum over tensor ranks."""
    node, _ = _tensor_sum(g)
    g.before(node, node.args[0], g.kernel("slept_on_last_rank"))
    return []
