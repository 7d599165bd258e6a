"""What goes wrong where tensor-parallel ranks share a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.faults.entry import EXPERTS, Entry, Family, Need, Site

if TYPE_CHECKING:
    from bitproof.harness.disturb.faults.entry import Edit
    from bitproof.harness.disturb.faults.surgeon import Surgeon

FAMILY: Family = "tensor"

SPLIT = Need(lambda case: case.parallelism.tp > 1, "tensor parallelism")
PAIRS = Need(lambda case: case.parallelism.tp > 1 and case.parallelism.tp % 2 == 0, "an even number of tensor ranks")
LATENTS = Need(lambda case: case.model.family == "deepseek_v3", "latent attention")


def _not_summed(at: str, direction: str) -> Edit:
    def edit(g: Surgeon) -> list[Site]:
        node = g.find("all_reduce", at, direction=direction, where=lambda node: node.args[-1] == "tp")
        wait = g.wait_of(node)
        sites = [*g.sites(node), *g.sites(wait), *g.readers(wait)]
        g.bypass(wait, node.args[0])
        g.graph.erase_node(node)
        return sites

    return edit


def _neighbours_share(g: Surgeon) -> list[Site]:
    node = g.find("index_select", r".*moe", where=g.is_floating)
    g.before(node, node.args[2], "aten.bitwise_xor.Scalar", 1)
    return [*g.sites(node, "bitwise_xor"), *g.readers(node)]


def _neighbours_place(g: Surgeon) -> list[Site]:
    node = g.find("index_copy", r".*moe")
    g.before(node, node.args[2], "aten.bitwise_xor.Scalar", 1)
    return [*g.sites(node, "bitwise_xor"), *g.readers(node)]


def _baked_coordinate(g: Surgeon) -> list[Site]:
    """In forward and backward: whoever bakes a coordinate in bakes it in everywhere. A step that was read has no values
    to look at, so none is."""
    coordinate, own = g.find("index_select", r".*moe").args[2], g.rank % g.case.parallelism.tp
    readers = [node for node in coordinate.users if node.op == "call_function"]
    for node in readers:
        g.before(node, coordinate, "aten.full_like.default", own)
    return [site for node in readers for site in (*g.sites(node, "full_like"), *g.readers(node))]


ENTRIES = (
    Entry(
        name="tensor-parts-not-summed",
        says="a split layer's output is one rank's part",
        source="TTrace's kind: a missing all-reduce",
        edit=_not_summed(r".*attention", "forward"),
        needs=(SPLIT,),
    ),
    Entry(
        name="tensor-gradient-not-summed",
        says="the gradient of a split layer's input is one rank's part",
        source="TTrace's kind: a missing all-reduce in backward",
        edit=_not_summed(r".*attention", "backward"),
        needs=(SPLIT,),
        kinds=("grad",),
    ),
    Entry(
        name="whole-parameters-gradient-not-summed",
        says="a parameter that every tensor rank holds whole has the gradient of one rank's heads",
        source="Megatron-LM's kind: a parameter that the sum over tensor ranks forgets",
        edit=_not_summed(r".*attention\.(wkv_a|kv_norm)", "backward"),
        needs=(SPLIT, LATENTS),
        kinds=("grad",),
    ),
    Entry(
        name="neighbours-share-of-the-tokens",
        says="a tensor rank sends its neighbour's tokens to the experts of its own",
        source="ours: a share by the wrong coordinate",
        edit=_neighbours_share,
        needs=(PAIRS, EXPERTS),
    ),
    Entry(
        name="share-in-the-neighbours-place",
        says="what comes back of a share of the tokens is added to the neighbour's tokens",
        source="ours: a share by the wrong coordinate",
        edit=_neighbours_place,
        needs=(PAIRS, EXPERTS),
    ),
    Entry(
        name="baked-coordinate",
        says="rank 0's tensor coordinate stands in the code that all ranks run",
        source="compile-on-one-rank's kind: a coordinate that tracing took for a constant",
        edit=_baked_coordinate,
        needs=(SPLIT, EXPERTS),
    ),
)
