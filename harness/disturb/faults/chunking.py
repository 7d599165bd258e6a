"""What goes wrong where a block's input is split in two and its outputs are joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.faults.entry import BLOCKS, CHUNKED, POSITIONS, SDPA, Entry, Family, Site

if TYPE_CHECKING:
    from bitproof.harness.disturb.faults.surgeon import Surgeon

FAMILY: Family = "chunking"

CHUNK_PASS = "torchtitan #3325, the chunking pass for expert overlap, and its contract in #3434"


def _first_half_twice(g: Surgeon) -> list[Site]:
    node = g.require(g.halves(1), "halves of activations")
    x, dim, start, _ = node.args
    node.args = (x, dim, 0, start)
    return [*g.sites(node, "split"), *g.chunk_root(node, "split", "slice"), *g.readers(node)]


def _joined_in_reverse(g: Surgeon) -> list[Site]:
    node = g.require(g.joins(), "chunks that are joined")
    node.args = (list(reversed(node.args[0])), *node.args[1:])
    return [*g.sites(node), *g.chunk_root(node, "cat")]


def _joined_twice(g: Surgeon) -> list[Site]:
    node = g.require(g.joins(), "chunks that are joined")
    node.args = ([node.args[0][0]] * 2, *node.args[1:])
    return [*g.sites(node), *g.chunk_root(node, "cat")]


def _overlap_by_one(g: Surgeon) -> list[Site]:
    node = g.require(g.halves(1), "halves of activations")
    x, dim, start, end = node.args
    node.args = (x, dim, start - 1, end - 1)
    return [*g.sites(node, "split"), *g.chunk_root(node, "split", "slice")]


def _interleaved(g: Surgeon) -> list[Site]:
    first, second = (g.require(g.halves(chunk), "halves of activations") for chunk in (0, 1))
    for chunk, node in enumerate((first, second)):
        node.args = (node.args[0], node.args[1], chunk, second.args[3], 2)
    return [
        site for node in (first, second) for site in (*g.sites(node, "split"), *g.chunk_root(node, "split", "slice"))
    ]


def _other_positions(g: Surgeon) -> list[Site]:
    found = [
        node
        for node in g.all("slice", ".*rope", chunk=1)
        if node.all_input_nodes[0].op == "placeholder" and not g.is_floating(node)
    ]
    node = g.require(found, "positions that are split")
    x, dim, start, _ = node.args
    node.args = (x, dim, 0, start)
    return [*g.sites(node, "split"), *g.chunk_root(node, "split", "slice"), *g.readers(node)]


def _other_residual(g: Surgeon) -> list[Site]:
    for node in g.all("add", r"layers\.\d+", chunk=1):
        source = node.args[0]
        if source.meta.get("chunk") == 1:
            node.args = (g.twin(source), *node.args[1:])
            return g.sites(node)
    return g.require([], "a residual that is split")


def _other_activation(g: Surgeon) -> list[Site]:
    node = g.find("silu_backward", r".*(shared_experts|feed_forward)", direction="backward", chunk=1)
    node.args = (node.args[0], g.twin(node.args[1]))
    return g.sites(node)


def _other_scale(g: Surgeon) -> list[Site]:
    root = g.find("rsqrt", r".*norm", chunk=1)
    node = next(user for user in root.users if g.is_floating(user) and "mul" in user.name)
    node.replace_input_with(root, g.twin(root))
    return g.sites(node)


ATTEND = "_scaled_dot_product_flash_attention_for_cpu"


def _sees_the_future(g: Surgeon) -> list[Site]:
    node = g.find(ATTEND, chunk=1)
    node.args = (*node.args[:4], False, *node.args[5:])
    return g.sites(node)


def _other_keys(g: Surgeon) -> list[Site]:
    node = g.find(ATTEND, chunk=1)
    node.args = (node.args[0], g.twin(node.args[1]), *node.args[2:])
    return g.sites(node)


def _gradient_halves_exchanged(g: Surgeon) -> list[Site]:
    first, second = (g.require(g.halves(chunk, "backward"), "halves of gradients") for chunk in (0, 1))
    first.args, second.args = second.args, first.args
    sites = [*g.sites(first, "split"), *g.sites(second, "split")]
    sites += [*g.readers(first), *g.readers(second), g.site(first, "clone"), g.site(second, "clone")]
    sites += [site for node in (first, second) for user in node.users for site in g.readers(user)]
    return [*sites, *g.chunk_root(first, "split", "slice")]  # a reshape of what is not contiguous is a clone


def _last_row_lost(g: Surgeon) -> list[Site]:
    node = g.require(g.joins(), "chunks that are joined")
    first = node.args[0][0]
    g.before(node, first, g.kernel("last_row_zeroed"), node.args[1] if len(node.args) > 1 else 0)
    return [g.site(first, name) for name in ("clone", "zero_", "select", "cat")] + g.sites(node)


def _other_routing_weights(g: Surgeon) -> list[Site]:
    node = g.find("mul", r".*router", chunk=1, where=lambda node: isinstance(node.args[1], float))
    reader = next(iter(node.users))
    reader.replace_input_with(node, g.twin(node))
    return [*g.sites(reader), *g.readers(reader)]


ENTRIES = (
    Entry(
        name="chunk-1-takes-the-first-half",
        says="chunk 1 is given the first half of a block's input again",
        source=CHUNK_PASS,
        edit=_first_half_twice,
        needs=(CHUNKED,),
    ),
    Entry(
        name="chunks-joined-in-reverse",
        says="a block's output has the second half first",
        source=CHUNK_PASS,
        edit=_joined_in_reverse,
        needs=(CHUNKED,),
    ),
    Entry(
        name="chunk-0-joined-twice",
        says="a block's output is the first half, twice",
        source="ours: a live-out's two values mapped to one node",
        edit=_joined_twice,
        needs=(CHUNKED,),
    ),
    Entry(
        name="halves-overlap-by-one",
        says="chunk 1 begins one row early and ends one row early",
        source="ours: an off-by-one split",
        edit=_overlap_by_one,
        needs=(CHUNKED,),
    ),
    Entry(
        name="halves-interleaved",
        says="even rows go to chunk 0 and odd ones to chunk 1, and are joined as halves",
        source="ours: a strided split, as context parallelism has for balance, joined as if it were contiguous",
        edit=_interleaved,
        needs=(CHUNKED,),
    ),
    Entry(
        name="chunk-1-uses-chunk-0s-positions",
        says="chunk 1 is rotated by the positions of chunk 0's rows",
        source="ours; blind wherever every row of a batch has the same positions",
        edit=_other_positions,
        needs=(BLOCKS,),
        sees=(POSITIONS,),
    ),
    Entry(
        name="chunk-1-adds-chunk-0s-residual",
        says="chunk 1's output is added to chunk 0's input",
        source=CHUNK_PASS,
        edit=_other_residual,
        needs=(BLOCKS,),
    ),
    Entry(
        name="backward-reads-the-other-chunks-activation",
        says="chunk 1's backward reads what chunk 0 saved",
        source=CHUNK_PASS,
        edit=_other_activation,
        needs=(CHUNKED,),
        kinds=("grad",),
    ),
    Entry(
        name="chunk-1-normalized-by-chunk-0",
        says="chunk 1 is divided by the root mean square of chunk 0",
        source="ours: a statistic taken for shared state",
        edit=_other_scale,
        needs=(BLOCKS,),
    ),
    Entry(
        name="chunk-1-sees-the-future",
        says="attention of chunk 1 alone is not causal",
        source="ours: a mask that is lost where a call is copied",
        edit=_sees_the_future,
        needs=(BLOCKS, SDPA),
    ),
    Entry(
        name="chunk-1-attends-to-chunk-0s-keys",
        says="queries of chunk 1 meet keys of chunk 0",
        source=CHUNK_PASS,
        edit=_other_keys,
        needs=(BLOCKS, SDPA),
    ),
    Entry(
        name="gradient-halves-exchanged",
        says="backward gives chunk 0 the gradient of chunk 1's half, and the other way round",
        source=CHUNK_PASS,
        edit=_gradient_halves_exchanged,
        needs=(CHUNKED,),
        kinds=("grad",),
    ),
    Entry(
        name="last-row-of-chunk-0-lost",
        says="the last row of chunk 0's output is zero, as padding would leave it",
        source="MaxText #3699: what pads a chunk is taken for data",
        edit=_last_row_lost,
        needs=(CHUNKED,),
    ),
    Entry(
        name="chunk-1-weighs-by-chunk-0s-routing",
        says="chunk 1's experts are weighted as chunk 0's tokens were routed",
        source="ours: a live-out of one region read by both chunks",
        edit=_other_routing_weights,
        needs=(CHUNKED,),
    ),
)
