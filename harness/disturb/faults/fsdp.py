"""Faults in sharding and gathering parameters, and in packing buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.entry import BUCKETS, DENSE_TRAFFIC, FLOAT32, Site, ranks, row

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import Call, GraphEditor


def _alike_parts(g: GraphEditor, split: Call) -> list[tuple[Call, Call]]:
    # A part is `getitem(split, index)`; the index is its position in the bucket.
    parts = sorted(split.users, key=lambda part: part.args[1])
    sizes = split.args[1]
    return [
        (one, other)
        for i, one in enumerate(parts)
        for other in parts[i + 1 :]
        # To exchange two parts of the same sum, such as both chunks' gradients of a parameter, is no fault.
        if sizes[one.args[1]] == sizes[other.args[1]] and _addition_of(one) is not _addition_of(other)
    ]


def _addition_of(node: Call) -> Call:
    """Follow `node`, a part of a bucket, from reader to reader until an addition, through at most four calls.

    Returns the addition, or the last call reached if there is none.
    """
    for _ in range(4):
        users = list(node.users)
        if not users or "add" in node.name:
            break
        node = users[0]
    return node


def _reader_sites(g: GraphEditor, nodes: list[Call], depth: int = 4) -> list[Site]:
    # The first readers of a part only view, cast or copy it, so blame may go several calls further.
    sites, reached = [], nodes
    for _ in range(depth):
        reached = [user for node in reached for user in node.users if user.op == "call_function"]
        sites += [g.site(node) for node in reached]
    return sites


def _parts_exchanged(g: GraphEditor, name: str, direction: str) -> list[Site]:
    splits = [x for x in g.all(name, direction=direction) if "default" in x.name and len(x.args[1]) > 1]
    pairs = [pair for split in splits for pair in _alike_parts(g, split)]
    one, other = g.require(pairs, "a bucket with two parameters of one size")
    # A part is `getitem(split, index)`.
    split = one.args[0]
    one.args, other.args = (split, other.args[1]), (split, one.args[1])
    return [g.site(split), g.site(one), g.site(other), *_reader_sites(g, [one, other])]


def _bucket_of_reductions(g: GraphEditor) -> Call:
    launches = g.launches("reduce_scatter_tensor", "backward")
    # Prefer a group of several ranks. A case without data parallelism has none.
    found = [x.args[0] for x in launches if "cat" in x.args[0].name and x.args[2] > 1]
    return g.require(found or [x.args[0] for x in launches if "cat" in x.args[0].name], "a bucket of reduce-scatters")


def _gather(g: GraphEditor) -> Call:
    return g.find("all_gather_into_tensor", where=lambda node: node.args[1] > 1)


@row("ours: packed by name, unpacked by position", needs=(BUCKETS,))
def gathered_parts_exchanged(g: GraphEditor) -> list[Site]:
    """two parameters of the same size are exchanged in a gathered bucket."""
    return _parts_exchanged(g, "split_with_sizes_copy", "forward")


@row("ours: an offset without its padding", needs=(BUCKETS,))
def gathered_bucket_shifted(g: GraphEditor) -> list[Site]:
    """a gathered bucket is unpacked with an offset of 1 element."""
    node = g.require([x for x in g.all("split_with_sizes_copy") if len(x.args[1]) > 1], "a bucket of all-gathers")
    # Along dim 1: dim 0 of a gathered bucket has a row for each rank.
    g.before(node, node.args[0], "aten.roll.default", [1], [1])
    return [g.site(node, "roll"), *g.sites(node)]


@row("ours: packed by name, unpacked by position", needs=(BUCKETS,), kinds=("grad",))
def reduced_parts_exchanged(g: GraphEditor) -> list[Site]:
    """two gradients of the same size are exchanged in a reduced bucket."""
    return _parts_exchanged(g, "split_with_sizes", "backward")


@row("DeepSpeed #7985: what comes last is not in what is reduced", needs=(BUCKETS,), kinds=("grad",))
def bucket_forgets_its_last_gradient(g: GraphEditor) -> list[Site]:
    """a bucket is reduced without its last gradient."""
    node = _bucket_of_reductions(g)
    *others, last = node.args[0]
    # Zeros of the same shape, so that the offsets of the other gradients stay.
    empty = g.make_before(node, "aten.zeros_like.default", last)
    node.args = ([*others, empty], *node.args[1:])
    return [*g.sites(node, "zeros_like", "reduce_scatter_tensor"), *g.readers(node)]


@row("ours: both chunks' gradients mapped to one node", needs=(BUCKETS,), kinds=("grad",))
def bucket_holds_a_gradient_twice(g: GraphEditor) -> list[Site]:
    """a bucket has the same gradient twice, in place of another."""
    node = _bucket_of_reductions(g)
    # A copy, since lists in the arguments of an fx node are immutable.
    parts = list(node.args[0])
    pairs = [(i, j) for i in range(len(parts)) for j in range(i + 1, len(parts)) if g.alike(parts[i], parts[j])]
    i, j = g.require(pairs, "a bucket with two gradients of one size")
    parts[j] = parts[i]
    node.args = (parts, *node.args[1:])
    return [*g.sites(node, "reduce_scatter_tensor"), *g.readers(node)]


@row("ours: two orders of one list", needs=(BUCKETS,), kinds=("grad",))
def bucket_packed_in_reverse(g: GraphEditor) -> list[Site]:
    """a bucket is packed from the last gradient and unpacked from the first."""
    node = _bucket_of_reductions(g)
    node.args = (list(reversed(node.args[0])), *node.args[1:])
    return [*g.sites(node, "reduce_scatter_tensor"), *g.readers(node)]


@row("ours: shards of uneven size taken for even ones", needs=(ranks(2),))
def shards_one_row_off(g: GraphEditor) -> list[Site]:
    """a gathered parameter's rows are shifted by one."""
    node = _gather(g)
    g.after(g.wait_of(node), "aten.roll.default", [1], [0])
    return [g.site(node, "roll")]


@row("FSDP's param_dtype", needs=(FLOAT32,))
def gathered_in_bfloat16(g: GraphEditor) -> list[Site]:
    """a parameter is gathered in bfloat16 for a step in float32."""
    node = _gather(g)
    narrow = g.before(node, node.args[0], "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    g.before(node, narrow, "aten._to_copy.default", dtype=g.dtype("float32"))
    return g.sites(node, "_to_copy")


@row("FSDP's reduce_dtype, one cast too early", needs=(FLOAT32,), kinds=("grad",))
def gradient_cast_before_its_reduction(g: GraphEditor) -> list[Site]:
    """a gradient is rounded to bfloat16 before it is reduced in float32."""
    node = g.find("reduce_scatter_tensor", direction="backward")
    narrow = g.before(node, node.args[0], "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    g.before(node, narrow, "aten._to_copy.default", dtype=g.dtype("float32"))
    return g.sites(node, "_to_copy")


@row("ours: resharding after forward, without the gather before backward", kinds=("grad",))
def gathered_parameter_freed_early(g: GraphEditor) -> list[Site]:
    """a gathered parameter's memory is overwritten before backward reads it."""
    # Backward transposes the weight that forward has transposed: t(t(wait)).
    again = [x for x in g.calls if g.site(x).operator == "t" and g.site(x).direction == "backward"]
    again = [x for x in again if g.site(x.all_input_nodes[0]).operator == "t"]
    found = [x for x in again if "wait_tensor" in x.all_input_nodes[0].all_input_nodes[0].name]
    node = g.require(found, "a weight that backward reads")
    # The transposes are views, so the memory to overwrite is that of the wait's result.
    g.make_before(node, "aten.zero_.default", node.all_input_nodes[0].args[0])
    weight = node.all_input_nodes[0].args[0]
    return [g.site(weight, "zero_"), *g.sites(node, "zero_"), *g.readers(node)]


def _alike_gathers(g: GraphEditor) -> tuple[Call, Call]:
    # Both in one group: only collectives of the same group are paired by their order.
    found = [node for node in g.launches("all_gather_into_tensor") if node.args[1] > 1]
    pairs = [
        (one, other)
        for i, one in enumerate(found)
        for other in found[i + 1 :]
        if one.args[-1] == other.args[-1] and g.alike(one.args[0], other.args[0])
    ]
    pair: tuple[Call, Call] = g.require(pairs, "two gathers in a group, with inputs of the same shape")
    return pair


def _move_before(g: GraphEditor, node: Call, anchor: Call) -> None:
    place = {found: index for index, found in enumerate(g.graph.nodes)}
    if node.op == "call_function" and place[node] > place[anchor]:
        # First the calls whose results it reads.
        for read in node.all_input_nodes:
            _move_before(g, read, anchor)
        anchor.prepend(node)


@row(
    "ours: a schedule of each rank's own clock; NCCL pairs collectives by their order",
    rank=-1,
    needs=(DENSE_TRAFFIC, ranks(2)),
)
def gathers_of_one_rank_in_another_order(g: GraphEditor) -> list[Site]:
    """the last rank launches two gathers of a group in the other order."""
    one, other = _alike_gathers(g)
    read, later = one.args[0], other.args[0]
    # On the last rank, the first launch reads the second's input, which must therefore be computed before.
    _move_before(g, later, one)
    sites = [site for node in (one, other) for site in (*g.sites(node), *_reader_sites(g, [node]))]
    # The launches stay in place, and the last rank exchanges their inputs. To NCCL it is the same as another order.
    g.before(one, read, g.kernel("other_on_last_rank"), later)
    g.before(other, later, g.kernel("other_on_last_rank"), read)
    return sites


@row("ours: a reduction that waits longer than its input's memory", needs=(DENSE_TRAFFIC,), kinds=("grad",))
def packed_gradients_overwritten_before_a_late_reduction(g: GraphEditor) -> list[Site]:
    """while a reduction waits for a dense region, its packed gradients are overwritten with zeros."""
    place = {node: index for index, node in enumerate(g.graph.nodes)}
    launches = g.launches("reduce_scatter_tensor", "backward")
    # A launch right after its input leaves no time in which its memory could be used again.
    found = [node for node in launches if place[node] > place[node.args[0]] + 1]
    node = g.require(found, "a reduction that is launched later than its input is there")
    sites = [*g.sites(node, "zero_"), *_reader_sites(g, [node])]
    g.make_before(node, "aten.zero_.default", node.args[0])
    return sites
