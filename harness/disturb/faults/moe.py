"""Faults in a mixture of experts: in routing tokens, counting them, sending them to experts and adding the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.entry import CHUNKED, EXPERTS, EXPORTED, FLOAT32, Need, Site, ranks, row, steps

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import Call, GraphEditor
    from bitproof.harness.disturb.tamper import TamperedCall

EXPERT_RANKS = Need(lambda case: case.parallelism.ep > 1, "expert parallelism")
MANY_ROWS = Need(
    lambda case: case.batch.sequences * case.batch.seq_len >= 1024,
    "1,024 tokens a rank or more, so that experts get more than 256 of them",
)
RECOMPUTE = "torchtitan #1593 and NeMo Automodel #3247: recomputation counts tokens again"


def _count(g: GraphEditor, chunk: int | None = None) -> Call:
    return g.find("add_", r".*moe", chunk=chunk)


def _is_biased(node: Call) -> bool:
    # The balancing bias is a buffer, and so an input of the graph.
    return any(x.op == "placeholder" for x in node.all_input_nodes)


def _router_through(g: GraphEditor, dtype: str) -> list[Site]:
    node = g.find("mm", r".*router")
    sites = g.sites(node, "_to_copy")
    g.instead(node, g.kernel("mm_through"), *node.args, g.dtype(dtype))
    return sites


@row("ours: a mutation lost in functionalization", needs=(EXPERTS,), kinds=("buffer",))
def tokens_not_counted(g: GraphEditor) -> list[Site]:
    """a chunk's tokens are not counted: the write into the buffer is dropped."""
    node = _count(g)
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.all_input_nodes[0])
    return sites


@row(RECOMPUTE, needs=(EXPERTS,), kinds=("buffer",))
def tokens_counted_twice(g: GraphEditor) -> list[Site]:
    """a chunk's tokens are counted twice."""
    node = _count(g)
    g.make_before(node, node.target, *node.args)
    return g.sites(node)


@row("ours: both chunks' writes with one operand", needs=(EXPERTS, CHUNKED), kinds=("buffer",))
def chunk_1_counts_chunk_0s_tokens(g: GraphEditor) -> list[Site]:
    """chunk 1 adds chunk 0's token counts in place of its own."""
    node = _count(g, 1)
    node.args = (node.args[0], g.twin(node.args[1]))
    return g.sites(node)


@row("ours; blind wherever no expert gets more than 256 tokens", needs=(EXPERTS,), sees=(MANY_ROWS,), kinds=("buffer",))
def tokens_counted_in_bfloat16(g: GraphEditor) -> list[Site]:
    """counts are kept in bfloat16, which has no odd integer above 256."""
    node = _count(g)
    buffer, counts = node.args
    sites = [*g.sites(node, "copy_", "_to_copy", "add"), g.site(counts, "_to_copy"), g.site(counts, "add")]
    narrow = [g.make_before(node, "aten._to_copy.default", x, dtype=g.dtype("bfloat16")) for x in (buffer, counts)]
    # The sum is in bfloat16. Below, `copy_` casts it to the dtype of the buffer.
    total = g.make_before(node, "aten.add.Tensor", *narrow)
    # Into the buffer, as the replaced call writes in place.
    g.instead(node, "aten.copy_.default", buffer, total)
    return sites


@row("ours; blind wherever no expert gets more than 255 tokens", needs=(EXPERTS,), sees=(MANY_ROWS,), kinds=("buffer",))
def tokens_counted_in_bytes(g: GraphEditor) -> list[Site]:
    """counts are kept in eight bits."""
    node = _count(g)
    counts = node.args[1]
    g.before(node, counts, g.kernel("narrowed_to_bytes"))
    return [*g.sites(node, "_to_copy"), g.site(counts, "_to_copy")]


@row(
    "Megatron-LM #7452: an all-reduce in place overwrites the local count",
    needs=(EXPERTS, EXPERT_RANKS),
    kinds=("buffer",),
)
def tokens_of_the_group_counted(g: GraphEditor) -> list[Site]:
    """a rank counts the tokens of all ranks in its expert-parallel group as its own."""
    node = _count(g)
    sites = [*g.sites(node, "all_reduce"), g.site(node.args[1], "all_reduce")]
    launched = g.make_before(node, "_c10d_functional.all_reduce.default", node.args[1], "sum", "ep")
    node.args = (node.args[0], g.make_before(node, "_c10d_functional.wait_tensor.default", launched))
    return sites


@row("ours, against arXiv:2408.15664; the bias is zero at the first step", needs=(EXPERTS, steps(2)))
def experts_weighted_by_biased_scores(g: GraphEditor) -> list[Site]:
    """the bias that balances experts changes their weights, not only the choice of experts."""
    node = g.find("gather", r".*router")
    biased = g.find("add", r".*router", where=_is_biased)
    node.args = (biased, *node.args[1:])
    return g.sites(node)


@row(
    "ours; seen only where the bias changes a choice",
    needs=(EXPERTS, steps(2)),
    sees=(MANY_ROWS,),
    kinds=("loss", "grad", "buffer"),
)
def balancing_bias_ignored(g: GraphEditor) -> list[Site]:
    """experts are chosen without the bias that balances them."""
    node = g.find("add", r".*router", where=_is_biased)
    sites = [*g.sites(node), *g.readers(node), g.site(node, "topk"), g.site(node, "masked_fill")]
    g.bypass(node, node.args[0])
    return sites


@row("TrainCheck's kind: a step of the recipe left out", needs=(EXPERTS,))
def weights_not_normalized(g: GraphEditor) -> list[Site]:
    """the weights of a token's experts are not divided by their sum."""
    node = g.find("div", r".*router")
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


@row("ours: two exact-looking operations in another order", needs=(EXPERTS,), sees=(FLOAT32,))
def weights_scaled_before_they_are_normalized(g: GraphEditor) -> list[Site]:
    """the weights of a token's experts are scaled before they are divided by their sum, instead of after."""
    node = g.find("mul", r".*router", where=lambda node: isinstance(node.args[1], float))
    ratio = node.args[0]
    sites = [*g.sites(node), *g.sites(ratio)]
    # (w / sum) * scale becomes (w * scale) / sum.
    scaled = g.make_before(ratio, "aten.mul.Tensor", ratio.args[0], node.args[1])
    ratio.args = (scaled, ratio.args[1])
    g.bypass(node, ratio)
    return sites


@row("ours: another order of three summands", needs=(EXPERTS,), sees=(FLOAT32,))
def experts_summed_from_the_other_end(g: GraphEditor) -> list[Site]:
    """the outputs of a token's experts are added from the last to the first."""
    node = g.find("unbind", r".*moe")
    parts = sorted(node.users, key=lambda part: part.args[1])
    # `getitem(unbind, place)`: the readers stay, and get the slots in reverse order.
    for place, part in enumerate(reversed(parts)):
        part.args = (node, place)
    return [site for part in parts for site in g.readers(part)]


@row(
    "Switch Transformer, arXiv:2101.03961, section 2.4: routers need float32; autocast takes it away", needs=(EXPERTS,)
)
def router_in_bfloat16(g: GraphEditor) -> list[Site]:
    """router scores are computed in bfloat16."""
    return _router_through(g, "bfloat16")


@row("Megatron-LM's router dtype fp64, where the reference has float32", needs=(EXPERTS,), sees=(FLOAT32,))
def router_in_float64(g: GraphEditor) -> list[Site]:
    """router scores are computed in float64."""
    return _router_through(g, "float64")


@row("ours, against arXiv:2412.19437", needs=(EXPERTS,), kinds=("loss", "grad", "buffer"))
def expert_groups_ignored(g: GraphEditor) -> list[Site]:
    """experts outside the top groups stay eligible."""
    node = g.find("masked_fill", r".*router")
    sites = [*g.sites(node), g.site(node, "topk"), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


@row("ours: an off-by-one", needs=(EXPERTS,), kinds=("loss", "grad", "buffer"))
def one_expert_group_too_few(g: GraphEditor) -> list[Site]:
    """experts are chosen from too few groups."""
    # The first `topk` rates groups by their best experts, the second chooses groups, and the third experts.
    node = g.find("topk", r".*router", turn=1)
    node.args = (node.args[0], 1, *node.args[2:])
    return [*g.sites(node, "scatter"), *g.readers(node)]


@row("ours: the wrong side of a search", needs=(EXPERTS, EXPERT_RANKS))
def border_rows_to_the_neighbour(g: GraphEditor) -> list[Site]:
    """an expert's first row is computed by the expert before it."""
    node = g.find("searchsorted", r".*experts")
    # At a border, `right` decides between the expert that ends there and the expert that begins there.
    node.kwargs = dict(node.kwargs) | {"right": False}
    return g.sites(node)


@row("transformers #48205: rows that a grouped product leaves unwritten", needs=(EXPERTS,))
def expert_ends_off_by_one(g: GraphEditor) -> list[Site]:
    """each expert's rows end a row early, and the last row is never computed."""
    # The ends of experts' rows are running sums of the counts, cast for the grouped product.
    node = g.find("_to_copy", r".*experts", where=lambda node: "cumsum" in str(node.args[0]))
    g.before(node, node.args[0], "aten.sub.Tensor", 1)
    return [g.site(node, "sub"), *g.sites(node)]


@row("ours", needs=(EXPERTS, EXPERT_RANKS))
def rows_not_put_back(g: GraphEditor) -> list[Site]:
    """experts' rows return by the forward permutation instead of its inverse."""
    # The first `index` sorts received rows by expert, the second puts results back.
    taken, returned = (g.find("index", r".*experts", turn=turn) for turn in (0, 1))
    returned.args = (returned.args[0], taken.args[1])
    return g.sites(returned)


@row("capacity factors drop tokens: Switch Transformer, arXiv:2101.03961", needs=(EXPERTS,))
def last_row_over_capacity(g: GraphEditor) -> list[Site]:
    """the last row that a rank's experts compute is set to zero, as if it exceeded the experts' capacity."""
    # The third grouped product is w2, whose rows are the experts' results.
    node = g.find("_grouped_mm", r".*experts", turn=2)
    g.after(node, g.kernel("last_row_zeroed"), 0)
    return [g.site(node, name) for name in ("clone", "zero_", "select")]


@row("ours: checkpoints that name w1 and w3 the other way round", needs=(EXPERTS,))
def gate_and_up_exchanged(g: GraphEditor) -> list[Site]:
    """the weights of the gate and up projections are exchanged, so silu is applied to the wrong one."""
    # The three grouped products are w1 (gate), w3 (up) and w2 (down), in this order.
    gate, up = (g.find("_grouped_mm", r".*experts", turn=turn) for turn in (0, 1))
    gate.args, up.args = (gate.args[0], up.args[1], *gate.args[2:]), (up.args[0], gate.args[1], *up.args[2:])
    return [*g.sites(gate), *g.sites(up), *g.readers(gate), *g.readers(up)]  # each product is right by itself


@row("ours", needs=(EXPERTS,))
def shared_experts_forgotten(g: GraphEditor) -> list[Site]:
    """the shared experts' output is not added."""
    node = g.find("add", r".*moe", where=lambda node: "mm" in str(node.args[1]))
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


@row("ours: a sign", operators=("add_",), needs=(EXPERTS,), kinds=("buffer",))
def bias_moves_away_from_balance(call: TamperedCall) -> Any:
    """the balancing bias of an expert with too few tokens is decreased instead of increased."""
    alpha = call.given("alpha")
    # Only the update of the bias gives `alpha` as a float. Other calls of `add_` run unchanged.
    return call.with_(alpha=-alpha) if isinstance(alpha, float) else call.run()


@row("torchtitan #4148: counts that leak into the next step", operators=("zero_",), needs=(EXPERTS,), kinds=("buffer",))
def counts_not_reset(call: TamperedCall) -> Any:
    """token counts are not zeroed after the update."""
    call.fire()
    # `zero_` returns its argument.
    return call.args[0]


@row(
    "TTrace's kind: router state not synchronized over ranks",
    operators=("all_reduce",),
    needs=(EXPERTS, ranks(2)),
    kinds=("buffer",),
)
def counts_not_summed_over_ranks(call: TamperedCall) -> Any:
    """each rank balances by its own tokens only."""
    call.fire()
    # A copy, since a functional collective returns a new tensor.
    return call.args[0].clone()


@row(
    "ours: counts as values, copied into their buffer once both chunks have read it",
    needs=(EXPORTED, CHUNKED, EXPERTS),
    kinds=("buffer",),
)
def tokens_of_chunk_0_forgotten(g: GraphEditor) -> list[Site]:
    """chunk 1 adds its token counts to the counts from before chunk 0."""
    second = g.find("copy_", r".*moe", chunk=1)
    first, new_counts = g.twin(second), second.args[1]
    new_counts.append(first)
    return [*g.sites(new_counts, "add_"), *g.sites(second)]
