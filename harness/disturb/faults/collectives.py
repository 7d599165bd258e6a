"""What goes wrong where ranks exchange what they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.faults.entry import EXPERTS, FLOAT32, Entry, Family, Need, Site, ranks, steps

if TYPE_CHECKING:
    from bitproof.harness.disturb.faults.entry import Edit
    from bitproof.harness.disturb.faults.surgeon import Call, Surgeon

FAMILY: Family = "collectives"

SQUARE = Need(
    lambda case: case.parallelism.ep > 1 and case.parallelism.ep == case.parallelism.expert_fsdp,
    "as many ranks that share a set of experts as that share an expert",
)
NO_BUCKETS = Need(lambda case: not case.pipeline.bucket, "collectives of one parameter each")
ORDERS = "NCCL #1497 and docs/explanation/gpus.md: the order of a sum over ranks is the transport's own"


def _gather(g: Surgeon) -> Call:
    return g.find("all_gather_into_tensor", r".*(norm|attention.*|feed_forward.*)", where=lambda node: node.args[1] > 1)


def _reduction(g: Surgeon) -> Call:
    return g.find("reduce_scatter_tensor", direction="backward", where=lambda node: node.args[2] > 1)


def _blocks_rotated(g: Surgeon) -> list[Site]:
    node = _gather(g)
    g.after(g.wait_of(node), g.kernel("rolled_blocks"), node.args[1])
    return [g.site(node, "roll")]


def _block_repeated(g: Surgeon) -> list[Site]:
    node = _gather(g)
    g.after(g.wait_of(node), g.kernel("first_block_repeated"), node.args[1])
    return [g.site(node, "cat"), g.site(node, "slice")]


def _neighbours_rows(g: Surgeon) -> list[Site]:
    node = _reduction(g)
    g.before(node, node.args[0], g.kernel("rolled_blocks"), node.args[2])
    return [g.site(node, "roll"), *g.sites(node)]


def _reduced_in_bfloat16(g: Surgeon) -> list[Site]:
    node = _reduction(g)
    g.before(node, node.args[0], "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    g.after(g.wait_of(node), "aten._to_copy.default", dtype=g.dtype("float32"))
    return g.sites(node, "_to_copy")


def _rows_in_reverse(g: Surgeon) -> list[Site]:
    node = g.find("all_to_all_single", r".*experts", turn=1)
    rows = node.args[0]
    g.before(node, rows, g.kernel("flipped_on_last_rank"))
    return [g.site(node, "flip"), g.site(rows, "flip")]


def _not_awaited(name: str, direction: str) -> Edit:
    def edit(g: Surgeon) -> list[Site]:
        node = g.find(name, direction=direction)
        wait = g.wait_of(node)
        sites = [*g.sites(node), *g.sites(wait), *g.readers(wait)]
        g.bypass(wait, node)
        return sites

    return edit


def _another_parameter(g: Surgeon) -> list[Site]:
    waits = [g.wait_of(node) for node in g.launches("all_gather_into_tensor")]
    pairs = [(one, other) for i, one in enumerate(waits) for other in waits[i + 1 :] if g.alike(one, other)]
    one, other = g.require(pairs, "two parameters of one shape")
    sites = [*g.sites(other), *g.readers(other), *(site for user in other.users for site in g.readers(user))]
    sites.append(g.site(other.all_input_nodes[0]))  # which nobody waits for any more
    g.bypass(other, one)
    return sites


def _wrong_group(g: Surgeon) -> list[Site]:
    node = g.find("reduce_scatter_tensor", r".*experts", direction="backward")
    node.args = (*node.args[:3], "ep")
    return g.sites(node)


def _gathered_late(g: Surgeon) -> list[Site]:
    node = _gather(g)
    g.before(node, node.args[0], g.kernel("of_step_before"), node.name)
    return [*g.sites(node, "clone")]


def _reduced_twice(g: Surgeon) -> list[Site]:
    node = _reduction(g)
    wait = g.wait_of(node)
    launched = g.after(wait, "_c10d_functional.all_reduce.default", "sum", node.args[3])
    g.after(launched, "_c10d_functional.wait_tensor.default")
    return [g.site(node, "all_reduce")]


def _loss_of_all_ranks(g: Surgeon) -> list[Site]:
    output = g.graph.output_node()
    loss, *gradients = g.outputs
    launched = g.make_before(output, "_c10d_functional.all_reduce.default", loss, "sum", "fsdp")
    done = g.make_before(output, "_c10d_functional.wait_tensor.default", launched)
    mean = g.make_before(output, "aten.div.Tensor", done, float(g.ranks))
    output.args = ([mean, *gradients],)
    return [Site("*", "*", None, "all_reduce"), Site("*", "*", None, "div")]


ENTRIES = (
    Entry(
        name="gathered-blocks-rotated",
        says="a gathered parameter has each rank's rows in its neighbour's place",
        source="ours: ranks of a group in another order",
        edit=_blocks_rotated,
        needs=(ranks(2), NO_BUCKETS),
    ),
    Entry(
        name="a-ranks-block-missing",
        says="a gathered parameter has the first rank's rows in the last rank's place",
        source="ours: one send too few",
        edit=_block_repeated,
        needs=(ranks(2), NO_BUCKETS),
    ),
    Entry(
        name="neighbours-rows-kept",
        says="a rank keeps its neighbour's rows of a reduced gradient",
        source="ours: an offset by the wrong coordinate",
        edit=_neighbours_rows,
        needs=(ranks(2),),
        kinds=("grad",),
    ),
    Entry(
        name="reduced-in-bfloat16",
        says="a gradient is summed over ranks in bfloat16",
        source="FSDP's reduce_dtype left at the dtype of compute",
        edit=_reduced_in_bfloat16,
        needs=(ranks(2),),
        kinds=("grad",),
    ),
    Entry(
        name="rows-sent-in-reverse",
        says="the last rank sends its routed rows in reverse order",
        source="ours",
        edit=_rows_in_reverse,
        needs=(EXPERTS,),
        rank=-1,
    ),
    Entry(
        name="gather-never-waited-for",
        says="a parameter is read before its all-gather was waited for",
        source="pytorch #180614: compiled code that never calls wait_tensor",
        edit=_not_awaited("all_gather_into_tensor", "forward"),
        needs=(ranks(2),),
        kinds=("loss", "grad", "param"),
    ),
    Entry(
        name="reduction-never-waited-for",
        says="a gradient is read before its reduce-scatter was waited for",
        source="pytorch #180614: compiled code that never calls wait_tensor",
        edit=_not_awaited("reduce_scatter_tensor", "backward"),
        needs=(ranks(2),),
        kinds=("grad", "param"),
    ),
    Entry(
        name="buffer-of-another-gather",
        says="a module reads the parameter that was gathered for another one, of the same shape",
        source="pytorch #108811: a collective's buffer that is reused too early",
        edit=_another_parameter,
        needs=(NO_BUCKETS,),
    ),
    Entry(
        name="wrong-group",
        says="an expert's gradient is summed over the ranks that hold other experts",
        source="Megatron-LM #5916 and #7452: a group of the right size and of the wrong ranks",
        edit=_wrong_group,
        needs=(SQUARE, NO_BUCKETS),
        kinds=("grad",),
    ),
    Entry(
        name="parameter-gathered-a-step-late",
        says="from the second step on a module computes with its parameter of the step before",
        source="ours: a prefetch before the update",
        edit=_gathered_late,
        needs=(steps(2), NO_BUCKETS),
    ),
    Entry(
        name="gradient-reduced-twice",
        says="rows of a reduced gradient are summed over ranks once more",
        source="Megatron-LM #5916: gradients of unlike rows mix",
        edit=_reduced_twice,
        needs=(ranks(2),),
        kinds=("grad",),
    ),
    Entry(
        name="loss-of-all-ranks",
        says="every rank shows the mean loss of all",
        source="torchtitan #105: the metric's group",
        edit=_loss_of_all_ranks,
        needs=(ranks(2),),
        kinds=("loss",),
    ),
    *(
        Entry(
            name=f"summed-{name}",
            says=f"sums over ranks are taken {says}",
            source=ORDERS,
            order=order,
            needs=(ranks(least),),
            sees=(FLOAT32,),
            kinds=("grad",),
            sites=(Site("*", "backward", "*", "reduce_scatter_tensor"),),
        )
        for name, order, least, says in (
            ("from-the-last-rank", "descending", 3, "from the last rank to the first"),
            ("in-pairs", "pairwise", 4, "in pairs, as a tree does"),
            ("by-position", "position", 3, "from another rank in each part of a message, as a ring does"),
        )
    ),
)
