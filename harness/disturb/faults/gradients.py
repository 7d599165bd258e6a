"""What goes wrong where gradients of chunks, branches, ranks and steps become one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.faults.entry import CHUNKED, EXPERTS, Entry, Family, Need, Site, ranks, steps

if TYPE_CHECKING:
    from bitproof.harness.disturb.faults.entry import Edit
    from bitproof.harness.disturb.faults.surgeon import Call, Surgeon

FAMILY: Family = "gradients"

REDUCED_APART = Need(
    lambda case: case.chunking is not None and not case.chunking.early_grad_accumulation and not case.pipeline.bucket,
    "chunks whose gradients are reduced each for itself, without buckets",
)
ODD_RANKS = Need(
    lambda case: case.parallelism.data_ranks & (case.parallelism.data_ranks - 1) != 0,
    "a number of data ranks that is no power of two: by one division is exact, wherever it stands",
)


def _sum(g: Surgeon) -> Call:
    return g.require(g.sums_of_chunks(), "gradients that are sums of both chunks' own")


def _kept(index: int) -> Edit:
    def edit(g: Surgeon) -> list[Site]:
        node = _sum(g)
        kept = node.args[index]
        sites = [*g.sites(node), g.site(kept), *g.readers(node)]
        g.bypass(node, kept)
        return sites

    return edit


def _counted_twice(g: Surgeon) -> list[Site]:
    node = _sum(g)
    node.args = (node.args[0], node.args[0])
    return g.sites(node)


def _added_first(g: Surgeon) -> list[Site]:
    sites, order = [], {node: index for index, node in enumerate(g.graph.nodes)}
    for node in g.sums_of_chunks():
        launches = [x.all_input_nodes[0] for x in node.args if x.name.startswith("wait_tensor")]
        if len(launches) == 2 and all("reduce_scatter" in x.name for x in launches):
            last = max(launches, key=order.__getitem__)
            sites += [*g.sites(node), *g.sites(launches[0], "add"), *g.sites(launches[1], "add")]
            total = g.make_before(last, "aten.add.Tensor", launches[0].args[0], launches[1].args[0])
            reduced = g.make_before(node, launches[0].target, total, *launches[0].args[1:])
            g.instead(node, "_c10d_functional.wait_tensor.default", reduced)
    g.require(sites, "two chunks' reduce-scatters of one parameter")
    return sites


def _added_in_bfloat16(g: Surgeon) -> list[Site]:
    node = _sum(g)
    sites = g.sites(node, "_to_copy")
    narrow, wide = g.dtype("bfloat16"), g.dtype("float32")
    parts = [g.make_before(node, "aten._to_copy.default", x, dtype=narrow) for x in node.args]
    total = g.make_before(node, "aten.add.Tensor", *parts)
    g.instead(node, "aten._to_copy.default", total, dtype=wide)
    return sites


def _not_averaged(g: Surgeon) -> list[Site]:
    node = g.find("full_like", direction="backward")
    node.args = (node.args[0], 1.0)
    return g.sites(node)


def _gradient_of(g: Surgeon, at: str = ".*") -> Call:
    """A gradient that is one reduce-scatter's result, of a parameter in a module of such a name."""
    return g.find("wait_tensor", at, direction="backward", where=lambda node: "reduce_scatter" in str(node.args[0]))


def _divided_twice(g: Surgeon) -> list[Site]:
    node = _gradient_of(g)
    g.after(node, "aten.div.Tensor", 3.0 if g.ranks == 1 else float(g.ranks))
    return [g.site(node, "div")]


def _averaged_last(g: Surgeon) -> list[Site]:
    sites = _not_averaged(g)
    size = g.case.parallelism.data_ranks
    for node in dict.fromkeys(g.gradients):
        g.after(node, "aten.mul.Tensor", 1 / size)
    return [*sites, Site("*", "backward", "*", "*")]


def _not_reduced(g: Surgeon) -> list[Site]:
    node = _gradient_of(g)
    launch = node.all_input_nodes[0]
    sites = [*g.sites(launch, "clone", "slice"), *g.readers(node)]
    g.instead(node, g.kernel("own_rows"), launch.args[0], launch.args[2])
    g.graph.erase_node(launch)
    return sites


def _router_untrained(g: Surgeon) -> list[Site]:
    node = g.find("sum", r".*moe", direction="backward")
    g.after(node, "aten.mul.Scalar", 0.0)
    return [g.site(node, "mul")]


def _branch_lost(g: Surgeon) -> list[Site]:
    found = g.all("add", "", direction="backward", where=lambda node: node not in g.gradients)
    node = g.require([x for x in found if x not in g.sums_of_chunks()], "a gradient of two branches")
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


def _exchanged(g: Surgeon) -> list[Site]:
    output = g.graph.output_node()
    loss, *gradients = g.outputs
    pairs = (
        (i, j)
        for i in range(len(gradients))
        for j in range(i + 1, len(gradients))
        if gradients[i] is not gradients[j] and g.alike(gradients[i], gradients[j])
    )
    i, j = g.require(list(pairs), "two gradients of one shape")
    found = [gradients[i], gradients[j]]
    gradients[i], gradients[j] = gradients[j], gradients[i]
    output.args = ([loss, *gradients],)
    return [g.site(node) for node in (*found, *(node for end in found for node in end.all_input_nodes))]


def _of_the_step_before(g: Surgeon) -> list[Site]:
    node = _gradient_of(g)
    g.after(node, g.kernel("of_step_before"), node.name)
    return [g.site(node, "clone"), Site(None, "update", None, "_fused_adamw_")]


def _not_zeroed(g: Surgeon) -> list[Site]:
    node = _gradient_of(g)
    g.after(node, g.kernel("with_step_before"), node.name)
    return [g.site(node, "add")]


def _clipped_by_own_norm(g: Surgeon) -> list[Site]:
    node = _gradient_of(g)
    g.after(node, g.kernel("clipped"), 1e-6)
    names = ("linalg_vector_norm", "mul", "full_like", "maximum", "reciprocal", "div")
    return [g.site(node, name) for name in names]


def _scaled_by_frequency(g: Surgeon) -> list[Site]:
    node = g.find("embedding_dense_backward", direction="backward")
    node.args = (*node.args[:4], True)
    return g.sites(node)


def _averaged_over_rows(g: Surgeon) -> list[Site]:
    node = g.find("sum", r".*norm", direction="backward", where=lambda node: len(node.args[1]) == 2)
    sites = g.sites(node, "mean")
    g.instead(node, "aten.mean.dim", *node.args)
    return sites


ENTRIES = (
    Entry(
        name="gradient-of-chunk-1-forgotten",
        says="a parameter's gradient is chunk 0's alone",
        source="DeepSpeed #7985: the last micro-batch's gradient is not in what is reduced",
        edit=_kept(0),
        needs=(CHUNKED,),
        kinds=("grad",),
    ),
    Entry(
        name="gradient-of-chunk-0-overwritten",
        says="chunk 1's gradient is stored where it should be added",
        source="Megatron-LM #3023: what accumulates and what is stored, mixed up",
        edit=_kept(1),
        needs=(CHUNKED,),
        kinds=("grad",),
    ),
    Entry(
        name="gradient-of-chunk-0-counted-twice",
        says="chunk 0's gradient is added to itself",
        source="ours: both summands mapped to one node",
        edit=_counted_twice,
        needs=(CHUNKED,),
        kinds=("grad",),
    ),
    Entry(
        name="gradients-added-before-reduction",
        says="both chunks' gradients are added before they are reduced over ranks",
        source="torchtitan #3636: chunks-then-ranks where the reference sums ranks-then-chunks",
        edit=_added_first,
        needs=(REDUCED_APART, ranks(2)),
        kinds=("grad",),
    ),
    Entry(
        name="chunk-gradients-added-in-bfloat16",
        says="two reduced gradients in float32 are added in bfloat16",
        source="trl #2175: accumulation in 16 bits",
        edit=_added_in_bfloat16,
        needs=(REDUCED_APART,),
        kinds=("grad",),
    ),
    Entry(
        name="gradient-not-averaged",
        says="gradients are sums over data ranks, not means",
        source="pytorch #167178 and Megatron-LM #673: a factor of the number of ranks too large",
        edit=_not_averaged,
        needs=(ranks(2),),
        kinds=("grad",),
    ),
    Entry(
        name="gradient-divided-twice",
        says="a gradient that is a mean is divided by the number of ranks again",
        source="pytorch #155903, VeOmni #1079: two parts of a system average",
        edit=_divided_twice,
        kinds=("grad",),
    ),
    Entry(
        name="gradient-averaged-after-the-sum",
        says="gradients are divided by the number of ranks after their reduction, not before",
        source="fairscale #565: dividing before or after; exact, and so unseen, by a power of two",
        edit=_averaged_last,
        sees=(ODD_RANKS,),
        kinds=("grad",),
    ),
    Entry(
        name="gradient-not-reduced",
        says="each rank keeps its own rows of one gradient, unsummed",
        source="verl #7493: gradient synchronization silently off",
        edit=_not_reduced,
        needs=(ranks(2), REDUCED_APART),
        kinds=("grad",),
    ),
    Entry(
        name="router-untrained",
        says="the gradient of the routing weights is zero",
        source="transformers #48687 and #48205: router gradients lost under expert parallelism, the loss right",
        edit=_router_untrained,
        needs=(EXPERTS,),
        kinds=("grad",),
    ),
    Entry(
        name="gradient-of-a-branch-lost",
        says="where two branches' gradients meet, one is dropped",
        source="transformers #48205: partial gradients that are never summed",
        edit=_branch_lost,
        kinds=("grad",),
    ),
    Entry(
        name="gradients-exchanged",
        says="two parameters of one shape have each other's gradient",
        source="Megatron-LM #5916: gradients of unlike parts mix; ours, outputs in another order",
        edit=_exchanged,
        kinds=("grad",),
    ),
    Entry(
        name="gradient-of-the-step-before",
        says="from the second step on a gradient is the one of the step before",
        source="ours: a double buffer read one step late",
        edit=_of_the_step_before,
        needs=(steps(2),),
        kinds=("grad",),
    ),
    Entry(
        name="gradient-not-zeroed",
        says="from the second step on a gradient has all earlier ones added",
        source="DeepSpeed #7839: zero_grad is skipped",
        edit=_not_zeroed,
        needs=(steps(2),),
        kinds=("grad",),
    ),
    Entry(
        name="gradient-clipped-by-own-norm",
        says="a gradient is clipped by the norm of what one rank holds of it",
        source="DeepSpeed #8475: the norm that clips is not that of the whole gradient",
        edit=_clipped_by_own_norm,
        kinds=("grad",),
    ),
    Entry(
        name="embedding-gradient-by-frequency",
        says="a token's embedding gradient is divided by how often the token occurs",
        source="ours: a flag of the operator",
        edit=_scaled_by_frequency,
        kinds=("grad",),
    ),
    Entry(
        name="gradient-averaged-over-rows",
        says="a norm's weight gradient is a mean over rows where it is a sum",
        source="unsloth and transformers #34191: means of means in gradient accumulation",
        edit=_averaged_over_rows,
        kinds=("grad",),
    ),
)
