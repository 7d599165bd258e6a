"""What goes wrong on one rank alone, or from a later step on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.faults.entry import EXPERTS, Entry, Family, Site, ranks, steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from bitproof.harness.disturb.faults.surgeon import Surgeon

FAMILY: Family = "ranks"

SILENT = "ours: silent data corruption of one device; Meta, arXiv:2102.11245"


def _after(
    kernel: str, operators: tuple[str, ...], name: str, at: str = ".*", direction: str = "forward"
) -> Callable[[Surgeon], list[Site]]:
    """A kernel behind a call."""

    def edit(g: Surgeon) -> list[Site]:
        node = g.find(name, at, direction=direction)
        g.after(node, g.kernel(kernel))
        return [g.site(node, operator) for operator in operators]

    return edit


def _before(kernel: str, operators: tuple[str, ...], name: str, at: str = ".*") -> Callable[[Surgeon], list[Site]]:
    """A kernel before a collective."""

    def edit(g: Surgeon) -> list[Site]:
        node = g.find(name, at)
        g.before(node, node.args[0], g.kernel(kernel))
        return [*(g.site(node, operator) for operator in operators), *g.sites(node)]

    return edit


def _tokens_rolled(g: Surgeon) -> list[Site]:
    node = g.find("embedding")
    g.before(node, node.args[1], g.kernel("flipped_on_last_rank"))
    return [g.site(node, "flip")]


def _counts_doubled(g: Surgeon) -> list[Site]:
    node = g.find("add_", r".*moe")
    g.before(node, node.args[1], g.kernel("doubled_on_last_rank"))
    return g.sites(node, "mul")


NUDGED = ("clone", "add_", "fill_", "index_put_", "copy_", "view", "index", "select")

ENTRIES = (
    Entry(
        name="gradient-doubled-on-one-rank",
        says="the last rank's gradient counts twice in a sum",
        source="ours: a rank that adds a micro-batch too many",
        edit=_after("doubled_on_last_rank", ("mul",), "mm", r".*(attention|feed_forward|experts).*", "backward"),
        kinds=("grad",),
        rank=-1,
        needs=(ranks(2),),
    ),
    Entry(
        name="one-ulp-on-one-rank",
        says="one element of a product is one ULP off, on the last rank",
        source=SILENT,
        edit=_after("nudged_on_last_rank", NUDGED, "mm", r".*attention.*"),
        rank=-1,
    ),
    Entry(
        name="one-ulp-from-the-second-step",
        says="one element of a product is one ULP off, from the second step on",
        source=SILENT,
        edit=_after("nudged_from_step_1", NUDGED, "mm", r".*attention.*"),
        needs=(steps(2),),
    ),
    Entry(
        name="zeros-from-the-second-step",
        says="an activation is zero from the second step on",
        source="ours: a buffer that is freed after its first use",
        edit=_after("zeroed_from_step_1", ("zeros_like",), "silu"),
        needs=(steps(2),),
    ),
    Entry(
        name="last-row-lost-on-one-rank",
        says="the last rank computes one row fewer",
        source="ours: uneven rows",
        edit=_after("last_row_zeroed_on_last_rank", ("clone", "zero_", "select"), "mm", r".*attention.*"),
        rank=-1,
    ),
    Entry(
        name="a-ranks-shard-doubled",
        says="the last rank sends twice its rows of a parameter",
        source="TTrace's kind: parameters that part between ranks",
        edit=_before(
            "doubled_on_last_rank", ("mul",), "all_gather_into_tensor", r".*(norm|attention.*|feed_forward.*)"
        ),
        rank=-1,
        needs=(ranks(2),),
    ),
    Entry(
        name="data-of-one-rank-in-reverse",
        says="the last rank reads its rows of tokens in another order than its labels",
        source="ours: a loader's order on one rank",
        edit=_tokens_rolled,
        rank=-1,
    ),
    Entry(
        name="counts-doubled-on-one-rank",
        says="the last rank counts its tokens twice",
        source="ours",
        edit=_counts_doubled,
        rank=-1,
        needs=(EXPERTS,),
        kinds=("buffer",),
    ),
)
