"""What goes wrong where tokens are routed, counted, sent to experts and summed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.faults.entry import CHUNKED, EXPERTS, FLOAT32, Entry, Family, Need, Site, ranks, steps

if TYPE_CHECKING:
    from bitproof.harness.disturb.faults.entry import Edit
    from bitproof.harness.disturb.faults.surgeon import Call, Surgeon
    from bitproof.harness.disturb.faults.tamper import TamperedCall

FAMILY: Family = "moe"

EXPERT_RANKS = Need(lambda case: case.parallelism.ep > 1, "expert parallelism")
MANY_ROWS = Need(
    lambda case: case.batch.sequences * case.batch.seq_len >= 1024,
    "1,024 tokens a rank or more, so that experts get more than 256 of them",
)
RECOMPUTE = "torchtitan #1593 and NeMo Automodel #3247: recomputation counts tokens again"
UPDATE_ADD = Site(None, "update", None, "add_")


def _count(g: Surgeon, chunk: int | None = None) -> Call:
    return g.find("add_", r".*moe", chunk=chunk)


def _not_counted(g: Surgeon) -> list[Site]:
    node = _count(g)
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.all_input_nodes[0])
    return sites


def _counted_twice(g: Surgeon) -> list[Site]:
    node = _count(g)
    g.make_before(node, node.target, *node.args)
    return g.sites(node)


def _others_counted(g: Surgeon) -> list[Site]:
    node = _count(g, 1)
    node.args = (node.args[0], g.twin(node.args[1]))
    return g.sites(node)


def _counted_in_bfloat16(g: Surgeon) -> list[Site]:
    node = _count(g)
    buffer, counts = node.args
    sites = [*g.sites(node, "copy_", "_to_copy", "add"), g.site(counts, "_to_copy"), g.site(counts, "add")]
    narrow = [g.make_before(node, "aten._to_copy.default", x, dtype=g.dtype("bfloat16")) for x in (buffer, counts)]
    total = g.make_before(node, "aten.add.Tensor", *narrow)
    g.instead(node, "aten.copy_.default", buffer, total)
    return sites


def _counted_in_bytes(g: Surgeon) -> list[Site]:
    node = _count(g)
    counts = node.args[1]
    g.before(node, counts, g.kernel("narrowed_to_bytes"))
    return [*g.sites(node, "_to_copy"), g.site(counts, "_to_copy")]


def _group_counted(g: Surgeon) -> list[Site]:
    node = _count(g)
    sites = [*g.sites(node, "all_reduce"), g.site(node.args[1], "all_reduce")]
    launched = g.make_before(node, "_c10d_functional.all_reduce.default", node.args[1], "sum", "ep")
    node.args = (node.args[0], g.make_before(node, "_c10d_functional.wait_tensor.default", launched))
    return sites


def _is_biased(node: Call) -> bool:
    return any(x.op == "placeholder" for x in node.all_input_nodes)


def _weights_biased(g: Surgeon) -> list[Site]:
    node = g.find("gather", r".*router")
    biased = g.find("add", r".*router", where=_is_biased)
    node.args = (biased, *node.args[1:])
    return g.sites(node)


def _bias_ignored(g: Surgeon) -> list[Site]:
    node = g.find("add", r".*router", where=_is_biased)
    sites = [*g.sites(node), *g.readers(node), g.site(node, "topk"), g.site(node, "masked_fill")]
    g.bypass(node, node.args[0])
    return sites


def _not_normalized(g: Surgeon) -> list[Site]:
    node = g.find("div", r".*router")
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


def _scaled_first(g: Surgeon) -> list[Site]:
    node = g.find("mul", r".*router", where=lambda node: isinstance(node.args[1], float))
    ratio = node.args[0]
    sites = [*g.sites(node), *g.sites(ratio)]
    scaled = g.make_before(ratio, "aten.mul.Tensor", ratio.args[0], node.args[1])
    ratio.args = (scaled, ratio.args[1])
    g.bypass(node, ratio)
    return sites


def _summed_from_the_end(g: Surgeon) -> list[Site]:
    node = g.find("unbind", r".*moe")
    parts = sorted(node.users, key=lambda part: part.args[1])
    for place, part in enumerate(reversed(parts)):
        part.args = (node, place)
    return [site for part in parts for site in g.readers(part)]


def _router_through(dtype: str) -> Edit:
    def edit(g: Surgeon) -> list[Site]:
        node = g.find("mm", r".*router")
        sites = g.sites(node, "_to_copy")
        g.instead(node, g.kernel("mm_through"), *node.args, g.dtype(dtype))
        return sites

    return edit


def _groups_ignored(g: Surgeon) -> list[Site]:
    node = g.find("masked_fill", r".*router")
    sites = [*g.sites(node), g.site(node, "topk"), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


def _one_group_less(g: Surgeon) -> list[Site]:
    node = g.find("topk", r".*router", turn=1)
    node.args = (node.args[0], 1, *node.args[2:])
    return [*g.sites(node, "scatter"), *g.readers(node)]


def _border_rows_shifted(g: Surgeon) -> list[Site]:
    node = g.find("searchsorted", r".*experts")
    node.kwargs = dict(node.kwargs) | {"right": False}
    return g.sites(node)


def _ends_off_by_one(g: Surgeon) -> list[Site]:
    node = g.find("_to_copy", r".*experts", where=lambda node: "cumsum" in str(node.args[0]))
    g.before(node, node.args[0], "aten.sub.Tensor", 1)
    return [g.site(node, "sub"), *g.sites(node)]


def _not_put_back(g: Surgeon) -> list[Site]:
    taken, returned = (g.find("index", r".*experts", turn=turn) for turn in (0, 1))
    returned.args = (returned.args[0], taken.args[1])
    return g.sites(returned)


def _last_row_dropped(g: Surgeon) -> list[Site]:
    node = g.find("_grouped_mm", r".*experts", turn=2)
    g.after(node, g.kernel("last_row_zeroed"), 0)
    return [g.site(node, name) for name in ("clone", "zero_", "select")]


def _gate_and_up_exchanged(g: Surgeon) -> list[Site]:
    gate, up = (g.find("_grouped_mm", r".*experts", turn=turn) for turn in (0, 1))
    gate.args, up.args = (gate.args[0], up.args[1], *gate.args[2:]), (up.args[0], gate.args[1], *up.args[2:])
    return [*g.sites(gate), *g.sites(up), *g.readers(gate), *g.readers(up)]  # each product is right by itself


def _shared_forgotten(g: Surgeon) -> list[Site]:
    node = g.find("add", r".*moe", where=lambda node: "mm" in str(node.args[1]))
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


def _away_from_balance(call: TamperedCall) -> Any:
    alpha = call.given("alpha")
    return call.with_(alpha=-alpha) if isinstance(alpha, float) else call.run()


def _not_reset(call: TamperedCall) -> Any:
    call.fire()
    return call.args[0]


def _not_summed(call: TamperedCall) -> Any:
    call.fire()
    return call.args[0].clone()


ENTRIES = (
    Entry(
        name="tokens-not-counted",
        says="a chunk's tokens are not counted: its write into the buffer was dropped",
        source="ours: a mutation lost in functionalization",
        edit=_not_counted,
        needs=(EXPERTS,),
        kinds=("buffer",),
    ),
    Entry(
        name="tokens-counted-twice",
        says="a chunk's tokens are counted twice",
        source=RECOMPUTE,
        edit=_counted_twice,
        needs=(EXPERTS,),
        kinds=("buffer",),
    ),
    Entry(
        name="chunk-1-counts-chunk-0s-tokens",
        says="chunk 1 adds chunk 0's counts",
        source="ours: both chunks' writes with one operand",
        edit=_others_counted,
        needs=(EXPERTS, CHUNKED),
        kinds=("buffer",),
    ),
    Entry(
        name="tokens-counted-in-bfloat16",
        says="counts are kept in bfloat16, which has no odd number above 256",
        source="ours; blind wherever no expert gets more than 256 tokens",
        edit=_counted_in_bfloat16,
        needs=(EXPERTS,),
        sees=(MANY_ROWS,),
        kinds=("buffer",),
    ),
    Entry(
        name="tokens-counted-in-bytes",
        says="counts are kept in eight bits",
        source="ours; blind wherever no expert gets more than 255 tokens",
        edit=_counted_in_bytes,
        needs=(EXPERTS,),
        sees=(MANY_ROWS,),
        kinds=("buffer",),
    ),
    Entry(
        name="tokens-of-the-group-counted",
        says="a rank counts the tokens of its whole expert group as its own",
        source="Megatron-LM #7452: an all-reduce in place overwrites the local count",
        edit=_group_counted,
        needs=(EXPERTS, EXPERT_RANKS),
        kinds=("buffer",),
    ),
    Entry(
        name="experts-weighted-by-biased-scores",
        says="the balancing bias enters the weights, not only the choice",
        source="ours, against arXiv:2408.15664; the bias is zero at the first step",
        edit=_weights_biased,
        needs=(EXPERTS, steps(2)),
    ),
    Entry(
        name="balancing-bias-ignored",
        says="experts are chosen without the balancing bias",
        source="ours; seen only where the bias changes a choice",
        edit=_bias_ignored,
        needs=(EXPERTS, steps(2)),
        kinds=("loss", "grad", "buffer"),
    ),
    Entry(
        name="weights-not-normalized",
        says="a token's weights are not divided by their sum",
        source="TrainCheck's kind: a step of the recipe left out",
        edit=_not_normalized,
        needs=(EXPERTS,),
    ),
    Entry(
        name="weights-scaled-before-they-are-normalized",
        says="weights are scaled and then divided by their sum, not the other way round",
        source="ours: two exact-looking operations in another order",
        edit=_scaled_first,
        needs=(EXPERTS,),
        sees=(FLOAT32,),
    ),
    Entry(
        name="experts-summed-from-the-other-end",
        says="a token's experts are summed from the last slot to the first",
        source="ours: another order of three summands",
        edit=_summed_from_the_end,
        needs=(EXPERTS,),
        sees=(FLOAT32,),
    ),
    Entry(
        name="router-in-bfloat16",
        says="router scores are computed in bfloat16",
        source="Switch Transformer, arXiv:2101.03961, section 2.4: routers need float32; autocast takes it away",
        edit=_router_through("bfloat16"),
        needs=(EXPERTS,),
    ),
    Entry(
        name="router-in-float64",
        says="router scores are computed in float64",
        source="Megatron-LM's router dtype fp64, where the reference has float32",
        edit=_router_through("float64"),
        needs=(EXPERTS,),
        sees=(FLOAT32,),
    ),
    Entry(
        name="expert-groups-ignored",
        says="experts outside of the top groups stay eligible",
        source="ours, against arXiv:2412.19437",
        edit=_groups_ignored,
        needs=(EXPERTS,),
        kinds=("loss", "grad", "buffer"),
    ),
    Entry(
        name="one-expert-group-too-few",
        says="one group of experts fewer stays eligible",
        source="ours: an off-by-one",
        edit=_one_group_less,
        needs=(EXPERTS,),
        kinds=("loss", "grad", "buffer"),
    ),
    Entry(
        name="border-rows-to-the-neighbour",
        says="an expert's first row counts as its neighbour's",
        source="ours: the wrong side of a search",
        edit=_border_rows_shifted,
        needs=(EXPERTS, EXPERT_RANKS),
    ),
    Entry(
        name="expert-ends-off-by-one",
        says="each expert's rows end one too early, and the last row is never computed",
        source="transformers #48205: rows that a grouped product leaves unwritten",
        edit=_ends_off_by_one,
        needs=(EXPERTS,),
    ),
    Entry(
        name="rows-not-put-back",
        says="experts' rows return by the permutation that they came by, not by its inverse",
        source="ours",
        edit=_not_put_back,
        needs=(EXPERTS, EXPERT_RANKS),
    ),
    Entry(
        name="last-row-over-capacity",
        says="the last row that an expert rank holds is dropped",
        source="capacity factors drop tokens: Switch Transformer, arXiv:2101.03961",
        edit=_last_row_dropped,
        needs=(EXPERTS,),
    ),
    Entry(
        name="gate-and-up-exchanged",
        says="silu is taken of the up projection",
        source="ours: checkpoints that name w1 and w3 the other way round",
        edit=_gate_and_up_exchanged,
        needs=(EXPERTS,),
    ),
    Entry(
        name="shared-experts-forgotten",
        says="the shared experts' output is not added",
        source="ours",
        edit=_shared_forgotten,
        needs=(EXPERTS,),
    ),
    Entry(
        name="bias-moves-away-from-balance",
        says="an expert with too few tokens loses bias",
        source="ours: a sign",
        call=_away_from_balance,
        operators=("add_",),
        needs=(EXPERTS,),
        kinds=("buffer",),
        sites=(UPDATE_ADD,),
    ),
    Entry(
        name="counts-not-reset",
        says="token counts are not zeroed after the update",
        source="torchtitan #4148: counts that leak into the next step",
        call=_not_reset,
        operators=("zero_",),
        needs=(EXPERTS,),
        kinds=("buffer",),
        sites=(Site(None, "update", None, "zero_"),),
    ),
    Entry(
        name="counts-not-summed-over-ranks",
        says="each rank balances by its own tokens",
        source="TTrace's kind: router state not synchronized over ranks",
        call=_not_summed,
        operators=("all_reduce",),
        needs=(EXPERTS, ranks(2)),
        kinds=("buffer",),
        sites=(Site(None, "update", None, "all_reduce"),),
    ),
)
