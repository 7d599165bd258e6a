"""Faults on one rank only, or from a later step on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.entry import EXPERTS, Site, ranks, row, steps

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import GraphEditor

SILENT = "ours: silent data corruption of one device; Meta, arXiv:2102.11245"
# Operators that the kernel `nudged` may call.
NUDGED = ("clone", "add_", "fill_", "index_put_", "copy_", "view", "index", "select")


def _after(
    g: GraphEditor, kernel: str, operators: tuple[str, ...], name: str, at: str = ".*", direction: str = "forward"
) -> list[Site]:
    node = g.find(name, at, direction=direction)
    g.after(node, g.kernel(kernel))
    return [g.site(node, operator) for operator in operators]


def _before(g: GraphEditor, kernel: str, operators: tuple[str, ...], name: str, at: str = ".*") -> list[Site]:
    node = g.find(name, at)
    g.before(node, node.args[0], g.kernel(kernel))
    return [*(g.site(node, operator) for operator in operators), *g.sites(node)]


@row("ours: a rank that adds a micro-batch too many", kinds=("grad",), rank=-1, needs=(ranks(2),))
def gradient_doubled_on_one_rank(g: GraphEditor) -> list[Site]:
    """the gradient of the last rank counts twice in a sum over ranks."""
    return _after(g, "doubled_on_last_rank", ("mul",), "mm", r".*(attention|feed_forward|experts).*", "backward")


@row(SILENT, rank=-1)
def one_ulp_on_one_rank(g: GraphEditor) -> list[Site]:
    """one element of a product is off by 1 ULP, on the last rank."""
    return _after(g, "nudged_on_last_rank", NUDGED, "mm", r".*attention.*")


@row(SILENT, needs=(steps(2),))
def one_ulp_from_the_second_step(g: GraphEditor) -> list[Site]:
    """one element of a product is off by 1 ULP, from the second step on."""
    return _after(g, "nudged_from_step_1", NUDGED, "mm", r".*attention.*")


@row("ours: a buffer that is freed after its first use", needs=(steps(2),))
def zeros_from_the_second_step(g: GraphEditor) -> list[Site]:
    """an activation is zero from the second step on."""
    return _after(g, "zeroed_from_step_1", ("zeros_like",), "silu")


@row("ours: uneven rows", rank=-1)
def last_row_lost_on_one_rank(g: GraphEditor) -> list[Site]:
    """the last row of a product is zero on the last rank."""
    return _after(g, "last_row_zeroed_on_last_rank", ("clone", "zero_", "select"), "mm", r".*attention.*")


@row("TTrace's kind: parameters that part between ranks", rank=-1, needs=(ranks(2),))
def a_ranks_shard_doubled(g: GraphEditor) -> list[Site]:
    """the last rank doubles its rows of a parameter before it sends them."""
    return _before(
        g, "doubled_on_last_rank", ("mul",), "all_gather_into_tensor", r".*(norm|attention.*|feed_forward.*)"
    )


@row("ours: a loader's order on one rank", rank=-1)
def data_of_one_rank_in_reverse(g: GraphEditor) -> list[Site]:
    """the last rank embeds its rows of tokens in reverse order, but keeps the order of its labels."""
    node = g.find("embedding")
    g.before(node, node.args[1], g.kernel("flipped_on_last_rank"))
    return [g.site(node, "flip")]


@row("ours", rank=-1, needs=(EXPERTS,), kinds=("buffer",))
def counts_doubled_on_one_rank(g: GraphEditor) -> list[Site]:
    """the last rank counts its tokens twice."""
    node = g.find("add_", r".*moe")
    g.before(node, node.args[1], g.kernel("doubled_on_last_rank"))
    return g.sites(node, "mul")
