"""Faults in adding gradients of chunks, branches, ranks and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.entry import CHUNKED, EXPERTS, PIECES, Need, Site, ranks, row, steps

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import Call, GraphEditor

REDUCED_APART = Need(
    lambda case: case.chunking is not None and not case.chunking.early_grad_accumulation and not case.pipeline.bucket,
    "chunks whose gradients are reduced one by one, without buckets",
)
ODD_RANKS = Need(
    lambda case: case.parallelism.data_ranks & (case.parallelism.data_ranks - 1) != 0,
    "a number of data ranks that is no power of two: by one division is exact, wherever it stands",
)


def _sum(g: GraphEditor) -> Call:
    return g.require(g.sums_of_chunks(), "gradients that are sums of both chunks' own")


def _keep_one_chunk(g: GraphEditor, index: int) -> list[Site]:
    node = _sum(g)
    kept = node.args[index]
    sites = [*g.sites(node), g.site(kept), *g.readers(node)]
    g.bypass(node, kept)
    return sites


def _not_averaged(g: GraphEditor) -> list[Site]:
    node = g.find("full_like", direction="backward")
    # Backward then starts from 1 instead of 1 divided by the number of data ranks.
    node.args = (node.args[0], 1.0)
    return g.sites(node)


def _last_sum_of_pieces(g: GraphEditor, rank: int) -> Call:
    # A loss has 0 dims, a gradient 2.
    return g.all("add", "output", where=lambda node: g.is_floating(node) and g.value(node).dim() == rank)[-1]


def _without_last_piece(g: GraphEditor, rank: int) -> list[Site]:
    node = _last_sum_of_pieces(g, rank)
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


def _gradient_of(g: GraphEditor, at: str = ".*") -> Call:
    return g.find("wait_tensor", at, direction="backward", where=lambda node: "reduce_scatter" in str(node.args[0]))


@row("DeepSpeed #7985: the last micro-batch's gradient is not in what is reduced", needs=(CHUNKED,), kinds=("grad",))
def gradient_of_chunk_1_forgotten(g: GraphEditor) -> list[Site]:
    """a parameter's gradient is chunk 0's only."""
    return _keep_one_chunk(g, 0)


@row("Megatron-LM #3023: what accumulates and what is stored, mixed up", needs=(CHUNKED,), kinds=("grad",))
def gradient_of_chunk_0_overwritten(g: GraphEditor) -> list[Site]:
    """chunk 1's gradient is stored instead of added."""
    return _keep_one_chunk(g, 1)


@row("ours: both summands mapped to one node", needs=(CHUNKED,), kinds=("grad",))
def gradient_of_chunk_0_counted_twice(g: GraphEditor) -> list[Site]:
    """chunk 0's gradient is added to itself, in place of chunk 1's."""
    node = _sum(g)
    node.args = (node.args[0], node.args[0])
    return g.sites(node)


@row(
    "torchtitan #3636: chunks-then-ranks where the reference sums ranks-then-chunks",
    needs=(REDUCED_APART, ranks(2)),
    kinds=("grad",),
)
def gradients_added_before_reduction(g: GraphEditor) -> list[Site]:
    """both chunks' gradients are added before they are reduced over ranks."""
    sites, order = [], {node: index for index, node in enumerate(g.graph.nodes)}
    for node in g.sums_of_chunks():
        launches = [x.all_input_nodes[0] for x in node.args if x.name.startswith("wait_tensor")]
        # The sum of both chunks' waits: each chunk was reduced by itself.
        if len(launches) == 2 and all("reduce_scatter" in x.name for x in launches):
            # Both gradients exist before the later of the two launches.
            last = max(launches, key=order.__getitem__)
            sites += [*g.sites(node), *g.sites(launches[0], "add"), *g.sites(launches[1], "add")]
            total = g.make_before(last, "aten.add.Tensor", launches[0].args[0], launches[1].args[0])
            reduced = g.make_before(node, launches[0].target, total, *launches[0].args[1:])
            # The chunks' own reduce-scatters stay in the graph, without a reader.
            g.instead(node, "_c10d_functional.wait_tensor.default", reduced)
    g.require(sites, "two chunks' reduce-scatters of one parameter")
    return sites


@row("trl #2175: accumulation in 16 bits", needs=(REDUCED_APART,), kinds=("grad",))
def chunk_gradients_added_in_bfloat16(g: GraphEditor) -> list[Site]:
    """two reduced gradients in float32 are added in bfloat16."""
    node = _sum(g)
    sites = g.sites(node, "_to_copy")
    narrow, wide = g.dtype("bfloat16"), g.dtype("float32")
    parts = [g.make_before(node, "aten._to_copy.default", x, dtype=narrow) for x in node.args]
    total = g.make_before(node, "aten.add.Tensor", *parts)
    # Back to float32, the dtype of the sum that later calls expect.
    g.instead(node, "aten._to_copy.default", total, dtype=wide)
    return sites


@row(
    "pytorch #167178 and Megatron-LM #673: a factor of the number of ranks too large",
    needs=(ranks(2),),
    kinds=("grad",),
)
def gradient_not_averaged(g: GraphEditor) -> list[Site]:
    """gradients are sums over data ranks, not means."""
    return _not_averaged(g)


@row("pytorch #155903, VeOmni #1079: two parts of a system average", kinds=("grad",))
def gradient_divided_twice(g: GraphEditor) -> list[Site]:
    """an averaged gradient is divided by the number of ranks again."""
    node = _gradient_of(g)
    # On a single rank a division by 1 would change nothing.
    g.after(node, "aten.div.Tensor", 3.0 if g.ranks == 1 else float(g.ranks))
    return [g.site(node, "div")]


@row(
    "fairscale #565: dividing before or after; exact, and so unseen, by a power of two",
    sees=(ODD_RANKS,),
    kinds=("grad",),
)
def gradient_averaged_after_the_sum(g: GraphEditor) -> list[Site]:
    """gradients are divided by the number of ranks after their reduction instead of before."""
    sites = _not_averaged(g)
    size = g.case.parallelism.data_ranks
    # A node that is the gradient of several parameters is scaled once.
    for node in dict.fromkeys(g.gradients):
        g.after(node, "aten.mul.Tensor", 1 / size)
    return [*sites, Site("*", "backward", "*", "*")]


@row("verl #7493: gradient synchronization silently off", needs=(ranks(2), REDUCED_APART), kinds=("grad",))
def gradient_not_reduced(g: GraphEditor) -> list[Site]:
    """each rank keeps its own unsummed rows of a gradient."""
    node = _gradient_of(g)
    launch = node.all_input_nodes[0]
    sites = [*g.sites(launch, "clone", "slice"), *g.readers(node)]
    g.instead(node, g.kernel("own_rows"), launch.args[0], *launch.args[2:4])
    g.graph.erase_node(launch)
    return sites


@row(
    "transformers #48687 and #48205: router gradients lost under expert parallelism, the loss right",
    needs=(EXPERTS,),
    kinds=("grad",),
)
def router_untrained(g: GraphEditor) -> list[Site]:
    """the gradient of the routing weights is zero."""
    node = g.find("sum", r".*moe", direction="backward")
    g.after(node, "aten.mul.Scalar", 0.0)
    return [g.site(node, "mul")]


@row("transformers #48205: partial gradients that are never summed", kinds=("grad",))
def gradient_of_a_branch_lost(g: GraphEditor) -> list[Site]:
    """one of two branches' gradients is left out of their sum."""
    # Autograd adds the gradients of branches outside any module. Sums of chunks belong to other faults.
    found = g.all("add", "", direction="backward", where=lambda node: node not in g.gradients)
    node = g.require([x for x in found if x not in g.sums_of_chunks()], "a gradient of two branches")
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


@row("Megatron-LM #5916: gradients of unlike parts mix; ours, outputs in another order", kinds=("grad",))
def gradients_exchanged(g: GraphEditor) -> list[Site]:
    """two parameters of the same shape have each other's gradient."""
    output = g.graph.output_node()
    loss, *gradients = g.outputs
    pairs = (
        (i, j)
        for i in range(len(gradients))
        for j in range(i + 1, len(gradients))
        # A node may be the gradient of two parameters: to exchange it with itself would change nothing.
        if gradients[i] is not gradients[j] and g.alike(gradients[i], gradients[j])
    )
    i, j = g.require(list(pairs), "two gradients of one shape")
    found = [gradients[i], gradients[j]]
    gradients[i], gradients[j] = gradients[j], gradients[i]
    output.args = ([loss, *gradients],)
    return [g.site(node) for node in (*found, *(node for end in found for node in end.all_input_nodes))]


@row("ours: a double buffer read one step late", needs=(steps(2),), kinds=("grad",))
def gradient_of_the_step_before(g: GraphEditor) -> list[Site]:
    """from the second step on, a gradient is that of the previous step."""
    node = _gradient_of(g)
    g.after(node, g.kernel("of_step_before"), node.name)
    return [g.site(node, "clone"), Site(None, "update", None, "_fused_adamw_")]


@row("DeepSpeed #7839: zero_grad is skipped", needs=(steps(2),), kinds=("grad",))
def gradient_not_zeroed(g: GraphEditor) -> list[Site]:
    """from the second step on, a gradient includes all earlier gradients."""
    node = _gradient_of(g)
    g.after(node, g.kernel("with_step_before"), node.name)
    return [g.site(node, "add")]


@row("DeepSpeed #8475: the norm that clips is not that of the whole gradient", kinds=("grad",))
def gradient_clipped_by_own_norm(g: GraphEditor) -> list[Site]:
    """a gradient is clipped by the norm of this rank's shard only."""
    node = _gradient_of(g)
    # A limit far below the norms of gradients, so that clipping always has an effect.
    g.after(node, g.kernel("clipped"), 1e-6)
    names = ("linalg_vector_norm", "mul", "full_like", "maximum", "reciprocal", "div")
    return [g.site(node, name) for name in names]


@row("ours: a flag of the operator", kinds=("grad",))
def embedding_gradient_by_frequency(g: GraphEditor) -> list[Site]:
    """a token's embedding gradient is divided by how often the token occurs."""
    node = g.find("embedding_dense_backward", direction="backward")
    # The argument `scale_grad_by_freq`.
    node.args = (*node.args[:4], True)
    return g.sites(node)


@row("unsloth and transformers #34191: means of means in gradient accumulation", kinds=("grad",))
def gradient_averaged_over_rows(g: GraphEditor) -> list[Site]:
    """a norm's weight gradient is a mean over rows instead of a sum."""
    # A weight's gradient is a sum over all dims of the input but the last; a norm's other sums are over the last.
    rank = len(g.case.input_shape)
    node = g.find("sum", r".*norm", direction="backward", where=lambda node: len(node.args[1]) == rank)
    sites = g.sites(node, "mean")
    g.instead(node, "aten.mean.dim", *node.args)
    return sites


@row("ours: a loop over pieces that ends a piece early", needs=(PIECES,), kinds=("loss",))
def last_piece_of_the_loss_forgotten(g: GraphEditor) -> list[Site]:
    """the loss of the last piece of tokens is not added."""
    return _without_last_piece(g, 0)


@row("ours: an accumulator that a piece does not reach", needs=(PIECES,), kinds=("grad",))
def last_piece_of_the_projection_forgotten(g: GraphEditor) -> list[Site]:
    """the vocabulary projection's gradient lacks the last piece of tokens."""
    return _without_last_piece(g, 2)


@row("ours: pieces that backward visits from the last to the first", needs=(PIECES,), kinds=("grad",))
def pieces_gradients_joined_in_reverse(g: GraphEditor) -> list[Site]:
    """the gradients of the pieces' hidden states are joined from the last piece to the first."""
    node = g.find("cat", "output")
    node.args = (list(reversed(node.args[0])), *node.args[1:])
    return g.sites(node)


@row("unsloth and transformers #34191: means of means", needs=(PIECES,))
def pieces_of_the_loss_not_averaged(g: GraphEditor) -> list[Site]:
    """the pieces' mean losses are added, and their sum is not divided by the number of pieces."""
    sites = []
    for node in g.all("div", "output", where=lambda node: node.args[1] == g.case.model.loss_pieces):
        sites += [*g.sites(node), *g.readers(node)]
        g.bypass(node, node.args[0])
    return sites


@row("ours: labels that are not moved on with the tokens", needs=(PIECES,))
def second_piece_has_the_firsts_labels(g: GraphEditor) -> list[Site]:
    """the second piece of tokens is compared with the labels of the first."""
    first, second = (node.args[1] for node in g.all("nll_loss_forward", "output")[:2])
    sites = [*g.sites(second), *g.readers(second), g.site(second, "scatter")]
    # A copy, since each replacement removes a reader from `users`.
    for reader in list(second.users):
        reader.replace_input_with(second, first)
    return sites
