"""Faults in splitting a block's input into two chunks and joining its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.entry import ANY, BLOCKS, CHUNKED, FOLDED, POSITIONS, SDPA, Need, Site, row

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import GraphEditor

CHUNK_PASS = "torchtitan #3325, the chunking pass for expert overlap, and its contract in #3434"
ATTEND = "_scaled_dot_product_flash_attention_for_cpu"


ROWS = Need(
    lambda case: (
        case.chunking is not None and (case.chunking.dim == "seq" or case.batch.sequences // case.micro_batches > 2)
    ),
    "halves of more than one row",
)


@row(CHUNK_PASS, needs=(CHUNKED,))
def chunk_1_takes_the_first_half(g: GraphEditor) -> list[Site]:
    """chunk 1 gets the first half of a block's input again."""
    node = g.require(g.halves(1), "halves of activations")
    # aten.slice(x, dim, start, end): chunk 1's half begins where chunk 0's ends.
    x, dim, start, _ = node.args
    node.args = (x, dim, 0, start)
    return [*g.sites(node, "split"), *g.chunk_root(node, "split", "slice"), *g.readers(node)]


@row(CHUNK_PASS, needs=(CHUNKED,))
def chunks_joined_in_reverse(g: GraphEditor) -> list[Site]:
    """a block's output has the second half first."""
    node = g.require(g.joins(), "chunks that are joined")
    node.args = (list(reversed(node.args[0])), *node.args[1:])
    return [*g.sites(node), *g.chunk_root(node, "cat")]


@row("ours: a live-out's two values mapped to one node", needs=(CHUNKED,))
def chunk_0_joined_twice(g: GraphEditor) -> list[Site]:
    """a block's output is the first half, twice."""
    node = g.require(g.joins(), "chunks that are joined")
    node.args = ([node.args[0][0]] * 2, *node.args[1:])
    return [*g.sites(node), *g.chunk_root(node, "cat")]


@row("ours: an off-by-one split", needs=(CHUNKED,))
def halves_overlap_by_one(g: GraphEditor) -> list[Site]:
    """chunk 1's half of a block's input begins and ends a row too early."""
    node = g.require(g.halves(1), "halves of activations")
    x, dim, start, end = node.args
    # Both ends move, so the half keeps its length, and no later call fails.
    node.args = (x, dim, start - 1, end - 1)
    return [*g.sites(node, "split"), *g.chunk_root(node, "split", "slice")]


@row(
    "ours: a strided split, as context parallelism has for balance, joined as if it were contiguous",
    needs=(CHUNKED, ROWS),
)
def halves_interleaved(g: GraphEditor) -> list[Site]:
    """even rows go to chunk 0 and odd rows to chunk 1, but are joined as halves."""
    # Chunk 1's half ends where the whole input ends.
    first, second = (g.require(g.halves(chunk), "halves of activations") for chunk in (0, 1))
    # aten.slice(x, dim, start, end, step): every second row, from row 0 or row 1.
    for chunk, node in enumerate((first, second)):
        node.args = (node.args[0], node.args[1], chunk, second.args[3], 2)
    return [
        site for node in (first, second) for site in (*g.sites(node, "split"), *g.chunk_root(node, "split", "slice"))
    ]


@row("ours; blind wherever every row of a batch has the same positions", needs=(BLOCKS,), sees=(POSITIONS,))
def chunk_1_uses_chunk_0s_positions(g: GraphEditor) -> list[Site]:
    """chunk 1's rotary embedding uses the positions of chunk 0's rows."""
    # Positions are integers, and an input of the graph.
    found = [
        node
        for node in g.all("slice", ".*rope", chunk=1)
        if node.all_input_nodes[0].op == "placeholder" and not g.is_floating(node)
    ]
    node = g.require(found, "positions that are split")
    x, dim, start, _ = node.args
    node.args = (x, dim, 0, start)
    return [*g.sites(node, "split"), *g.chunk_root(node, "split", "slice"), *g.readers(node)]


@row("ours: a mask that is given to both chunks, as one row for all is", needs=(BLOCKS, FOLDED))
def chunk_1_masked_by_chunk_0s_documents(g: GraphEditor) -> list[Site]:
    """chunk 1 attends under the mask of chunk 0's documents."""
    # Offsets are integers, too, but the graph computes them from positions.
    found = [
        node
        for node in g.all("slice", r"layers\.\d+\.attention", chunk=1)
        if node.all_input_nodes[0].op != "placeholder" and not g.is_floating(node)
    ]
    node = g.require(found, "offsets that are split")
    x, dim, start, _ = node.args
    node.args = (x, dim, 0, start)
    # Attention reads the offsets within its mask.
    masks = [*g.readers(node), Site(ANY, "forward", 1, "flex_attention")]
    return [*g.sites(node, "split"), *g.chunk_root(node, "split", "slice"), *masks]


@row("ours: sequences are joined, and their mask is forgotten", needs=(FOLDED,))
def folded_documents_forgotten(g: GraphEditor) -> list[Site]:
    """a token attends to every earlier token, also of other documents."""
    # offsets = indices - positions: see `document_offsets`.
    node = g.find("sub", "", where=lambda node: not g.is_floating(node))
    # Listed before the edit: afterwards the only reader of `node` is the inserted call.
    sites = [*g.sites(node), *g.readers(node)]
    g.after(node, "aten.zeros_like.default")
    return [*sites, *g.sites(node, "zeros_like")]


@row(CHUNK_PASS, needs=(BLOCKS,))
def chunk_1_adds_chunk_0s_residual(g: GraphEditor) -> list[Site]:
    """chunk 1's output is added to chunk 0's input."""
    for node in g.all("add", r"layers\.\d+", chunk=1):
        source = node.args[0]
        if source.meta.get("chunk") == 1:
            node.args = (g.twin(source), *node.args[1:])
            return g.sites(node)
    # No addition reads chunk 1's own input.
    return g.require([], "a residual that is split")


@row(CHUNK_PASS, needs=(CHUNKED,), kinds=("grad",))
def backward_reads_the_other_chunks_activation(g: GraphEditor) -> list[Site]:
    """chunk 1's backward reads the activation saved by chunk 0."""
    node = g.find("silu_backward", r".*(shared_experts|feed_forward)", direction="backward", chunk=1)
    # silu_backward(gradient, x): x is the value that forward saved.
    node.args = (node.args[0], g.twin(node.args[1]))
    return g.sites(node)


@row("ours: a statistic taken for shared state", needs=(BLOCKS,))
def chunk_1_normalized_by_chunk_0(g: GraphEditor) -> list[Site]:
    """chunk 1 is divided by the root mean square of chunk 0."""
    root = g.find("rsqrt", r".*norm", chunk=1)
    # The product of the input and the reciprocal root.
    node = next(user for user in root.users if g.is_floating(user) and "mul" in user.name)
    node.replace_input_with(root, g.twin(root))
    return g.sites(node)


@row("ours: a mask that is lost where a call is copied", needs=(BLOCKS, SDPA))
def chunk_1_sees_the_future(g: GraphEditor) -> list[Site]:
    """only chunk 1's attention is not causal."""
    node = g.find(ATTEND, chunk=1)
    # The argument `is_causal`.
    node.args = (*node.args[:4], False, *node.args[5:])
    return g.sites(node)


@row(CHUNK_PASS, needs=(BLOCKS, SDPA))
def chunk_1_attends_to_chunk_0s_keys(g: GraphEditor) -> list[Site]:
    """queries of chunk 1 attend to keys of chunk 0."""
    node = g.find(ATTEND, chunk=1)
    node.args = (node.args[0], g.twin(node.args[1]), *node.args[2:])
    return g.sites(node)


@row(CHUNK_PASS, needs=(CHUNKED,), kinds=("grad",))
def gradient_halves_exchanged(g: GraphEditor) -> list[Site]:
    """backward exchanges the two chunks' halves of a gradient."""
    first, second = (g.require(g.halves(chunk, "backward"), "halves of gradients") for chunk in (0, 1))
    first.args, second.args = second.args, first.args
    sites = [*g.sites(first, "split"), *g.sites(second, "split")]
    sites += [*g.readers(first), *g.readers(second), g.site(first, "clone"), g.site(second, "clone")]
    # A reader may only move the values, so its own readers may be the first calls with a wrong result.
    sites += [site for node in (first, second) for user in node.users for site in g.readers(user)]
    return [*sites, *g.chunk_root(first, "split", "slice")]  # a reshape of a non-contiguous tensor is a clone


@row("MaxText #3699: what pads a chunk is taken for data", needs=(CHUNKED,))
def last_row_of_chunk_0_lost(g: GraphEditor) -> list[Site]:
    """the last row of chunk 0's output is zero, as padding would leave it."""
    node = g.require(g.joins(), "chunks that are joined")
    first = node.args[0][0]
    # `cat` without a dim joins along dim 0.
    g.before(node, first, g.kernel("last_row_zeroed"), node.args[1] if len(node.args) > 1 else 0)
    # The kernel's calls have no origin, so reports name them at the origin of the value that they read.
    return [g.site(first, name) for name in ("clone", "zero_", "select", "cat")] + g.sites(node)


@row("ours: a live-out of one region read by both chunks", needs=(CHUNKED,))
def chunk_1_weighs_by_chunk_0s_routing(g: GraphEditor) -> list[Site]:
    """the outputs of the experts for chunk 1's tokens are weighted by the router's weights for chunk 0's tokens."""
    # The product with a number is the router's last step: the scale of the weights.
    node = g.find("mul", r".*router", chunk=1, where=lambda node: isinstance(node.args[1], float))
    reader = next(iter(node.users))
    reader.replace_input_with(node, g.twin(node))
    return [*g.sites(reader), *g.readers(reader)]
