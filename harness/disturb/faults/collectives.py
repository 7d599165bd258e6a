"""Faults in collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.entry import EXPERTS, FLOAT32, Need, Site, ranks, row, steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from bitproof.harness.disturb.entry import Entry
    from bitproof.harness.disturb.graph_editor import Call, GraphEditor

SQUARE = Need(
    lambda case: case.parallelism.ep > 1 and case.parallelism.ep == case.parallelism.expert_fsdp,
    "as many ranks that share a set of experts as that share an expert",
)
NO_BUCKETS = Need(lambda case: not case.pipeline.bucket, "collectives of one parameter each")
ORDERS = "NCCL #1497 and docs/explanation/gpus.md: the order of a sum over ranks is the transport's own"


def _gather(g: GraphEditor) -> Call:
    # args[1] is the number of ranks: with a single rank, the fault would change nothing.
    return g.find("all_gather_into_tensor", r".*(norm|attention.*|feed_forward.*)", where=lambda node: node.args[1] > 1)


def _reduction(g: GraphEditor) -> Call:
    # reduce_scatter_tensor(x, operation, size, group): here, too, a single rank would change nothing.
    return g.find("reduce_scatter_tensor", direction="backward", where=lambda node: node.args[2] > 1)


def _not_awaited(g: GraphEditor, name: str, direction: str) -> list[Site]:
    node = g.find(name, direction=direction)
    wait = g.wait_of(node)
    # Listed before the edit, which removes the wait and its readers.
    sites = [*g.sites(node), *g.sites(wait), *g.readers(wait)]
    g.bypass(wait, node)
    return sites


@row("ours: ranks of a group in another order", needs=(ranks(2), NO_BUCKETS))
def gathered_blocks_rotated(g: GraphEditor) -> list[Site]:
    """each rank's rows of a gathered parameter are at the next rank's offset."""
    node = _gather(g)
    # After the wait, since the gathered rows are complete only then.
    g.after(g.wait_of(node), g.kernel("rolled_blocks"), node.args[1])
    return [g.site(node, "roll")]


@row("ours: one send too few", needs=(ranks(2), NO_BUCKETS))
def a_ranks_block_missing(g: GraphEditor) -> list[Site]:
    """a gathered parameter has the first rank's rows where the last rank's belong."""
    node = _gather(g)
    g.after(g.wait_of(node), g.kernel("first_block_repeated"), node.args[1])
    return [g.site(node, "cat"), g.site(node, "slice")]


@row("ours: an offset by the wrong coordinate", needs=(ranks(2),), kinds=("grad",))
def neighbours_rows_kept(g: GraphEditor) -> list[Site]:
    """a rank keeps its neighbour's rows of a reduced gradient."""
    node = _reduction(g)
    g.before(node, node.args[0], g.kernel("rolled_blocks"), node.args[2])
    return [g.site(node, "roll"), *g.sites(node)]


@row("FSDP's reduce_dtype left at the dtype of compute", needs=(ranks(2),), kinds=("grad",))
def reduced_in_bfloat16(g: GraphEditor) -> list[Site]:
    """a gradient is summed over ranks in bfloat16."""
    node = _reduction(g)
    g.before(node, node.args[0], "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    # The cast back keeps the dtype that later calls expect.
    g.after(g.wait_of(node), "aten._to_copy.default", dtype=g.dtype("float32"))
    return g.sites(node, "_to_copy")


@row("ours", needs=(EXPERTS,), rank=-1)
def rows_sent_in_reverse(g: GraphEditor) -> list[Site]:
    """the last rank sends its routed rows in reverse order."""
    # The first all-to-all exchanges counts, the second rows.
    node = g.find("all_to_all_single", r".*experts", turn=1)
    rows = node.args[0]
    g.before(node, rows, g.kernel("flipped_on_last_rank"))
    return [g.site(node, "flip"), g.site(rows, "flip")]


@row("pytorch #180614: compiled code that never calls wait_tensor", needs=(ranks(2),), kinds=("loss", "grad", "param"))
def gather_never_waited_for(g: GraphEditor) -> list[Site]:
    """a parameter is read without waiting for its all-gather."""
    return _not_awaited(g, "all_gather_into_tensor", "forward")


@row("pytorch #180614: compiled code that never calls wait_tensor", needs=(ranks(2),), kinds=("grad", "param"))
def reduction_never_waited_for(g: GraphEditor) -> list[Site]:
    """a gradient is read without waiting for its reduce-scatter."""
    return _not_awaited(g, "reduce_scatter_tensor", "backward")


@row("pytorch #108811: a collective's buffer that is reused too early", needs=(NO_BUCKETS,))
def buffer_of_another_gather(g: GraphEditor) -> list[Site]:
    """a module reads another module's gathered parameter of the same shape."""
    waits = [g.wait_of(node) for node in g.launches("all_gather_into_tensor")]
    pairs = [(one, other) for i, one in enumerate(waits) for other in waits[i + 1 :] if g.alike(one, other)]
    one, other = g.require(pairs, "two parameters of one shape")
    # A reader may only cast or transpose the parameter, so its own readers may be blamed instead.
    sites = [*g.sites(other), *g.readers(other), *(site for user in other.users for site in g.readers(user))]
    sites.append(g.site(other.all_input_nodes[0]))  # its wait was removed
    g.bypass(other, one)
    return sites


@row(
    "Megatron-LM #5916 and #7452: a group of the right size and of the wrong ranks",
    needs=(SQUARE, NO_BUCKETS),
    kinds=("grad",),
)
def wrong_group(g: GraphEditor) -> list[Site]:
    """an expert's gradient is summed over the ranks that hold other experts."""
    node = g.find("reduce_scatter_tensor", r".*experts", direction="backward")
    # reduce_scatter_tensor(x, operation, size, group).
    node.args = (*node.args[:3], "ep")
    return g.sites(node)


@row("ours: a prefetch before the update", needs=(steps(2), NO_BUCKETS))
def parameter_gathered_a_step_late(g: GraphEditor) -> list[Site]:
    """from the second step on, a module computes with its parameter of the previous step."""
    node = _gather(g)
    g.before(node, node.args[0], g.kernel("of_step_before"), node.name)
    return [*g.sites(node, "clone")]


@row("Megatron-LM #5916: gradients of unlike rows mix", needs=(ranks(2),), kinds=("grad",))
def gradient_reduced_twice(g: GraphEditor) -> list[Site]:
    """rows of a reduced gradient are summed over ranks a second time."""
    node = _reduction(g)
    wait = g.wait_of(node)
    # args[3] is the group of the reduce-scatter.
    launched = g.after(wait, "_c10d_functional.all_reduce.default", "sum", node.args[3])
    g.after(launched, "_c10d_functional.wait_tensor.default")
    return [g.site(node, "all_reduce")]


@row("torchtitan #105: the metric's group", needs=(ranks(2),), kinds=("loss",))
def loss_of_all_ranks(g: GraphEditor) -> list[Site]:
    """every rank reports the mean loss over all ranks."""
    output = g.graph.output_node()
    # Only the reported loss changes; backward began from each rank's own.
    loss, *gradients = g.outputs
    launched = g.make_before(output, "_c10d_functional.all_reduce.default", loss, "sum", "fsdp")
    done = g.make_before(output, "_c10d_functional.wait_tensor.default", launched)
    mean = g.make_before(output, "aten.div.Tensor", done, float(g.ranks))
    output.args = ([mean, *gradients],)
    return [Site("*", "*", None, "all_reduce"), Site("*", "*", None, "div")]


def _sum_order_row(order: str, least: int) -> Callable[[Callable[..., Any]], Entry]:
    # With fewer than `least` ranks, this order gives the same sum as rank order.
    sites = (Site("*", "backward", "*", "reduce_scatter_tensor"),)
    return row(ORDERS, order=order, needs=(ranks(least),), sees=(FLOAT32,), kinds=("grad",), sites=sites)


@_sum_order_row("descending", least=3)
def summed_from_the_last_rank() -> None:
    """sums over ranks are taken from the last rank to the first."""


@_sum_order_row("pairwise", least=4)
def summed_in_pairs() -> None:
    """sums over ranks are taken in pairs, as a tree does."""


@_sum_order_row("position", least=3)
def summed_by_position() -> None:
    """sums over ranks start at a different rank for each part of a message, as in a ring."""
