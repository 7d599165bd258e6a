"""What goes wrong where parameters are sharded, gathered and joined in buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.faults.entry import BUCKETS, FLOAT32, Entry, Family, Site, ranks

if TYPE_CHECKING:
    from bitproof.harness.disturb.faults.entry import Edit
    from bitproof.harness.disturb.faults.surgeon import Call, Surgeon

FAMILY: Family = "fsdp"


def _alike_parts(g: Surgeon, split: Call) -> list[tuple[Call, Call]]:
    parts = sorted(split.users, key=lambda part: part.args[1])
    sizes = split.args[1]
    return [
        (one, other)
        for i, one in enumerate(parts)
        for other in parts[i + 1 :]
        if sizes[one.args[1]] == sizes[other.args[1]] and _total(one) is not _total(other)
    ]


def _total(node: Call) -> Call:
    """The sum that a bucket's part goes into: both chunks' gradients of one parameter may change places unseen."""
    for _ in range(4):
        users = list(node.users)
        if not users or "add" in node.name:
            break
        node = users[0]
    return node


def _through(g: Surgeon, nodes: list[Call], depth: int = 4) -> list[Site]:
    """The places of the calls that read some nodes, through the next few calls."""
    sites, reached = [], nodes
    for _ in range(depth):
        reached = [user for node in reached for user in node.users if user.op == "call_function"]
        sites += [g.site(node) for node in reached]
    return sites


def _parts_exchanged(name: str, direction: str) -> Edit:
    def edit(g: Surgeon) -> list[Site]:
        splits = [x for x in g.all(name, direction=direction) if "default" in x.name and len(x.args[1]) > 1]
        pairs = [pair for split in splits for pair in _alike_parts(g, split)]
        one, other = g.require(pairs, "a bucket with two parameters of one size")
        split = one.args[0]
        one.args, other.args = (split, other.args[1]), (split, one.args[1])
        return [g.site(split), g.site(one), g.site(other), *_through(g, [one, other])]

    return edit


def _bucket_of_gathers(g: Surgeon) -> Call:
    return g.require([x for x in g.all("split_with_sizes_copy") if len(x.args[1]) > 1], "a bucket of all-gathers")


def _shifted(g: Surgeon) -> list[Site]:
    node = _bucket_of_gathers(g)
    g.before(node, node.args[0], "aten.roll.default", [1], [1])
    return [g.site(node, "roll"), *g.sites(node)]


def _bucket_of_reductions(g: Surgeon) -> Call:
    launches = g.launches("reduce_scatter_tensor", "backward")
    found = [x.args[0] for x in launches if "cat" in x.args[0].name and x.args[2] > 1]
    return g.require(found or [x.args[0] for x in launches if "cat" in x.args[0].name], "a bucket of reduce-scatters")


def _last_forgotten(g: Surgeon) -> list[Site]:
    node = _bucket_of_reductions(g)
    *others, last = node.args[0]
    empty = g.make_before(node, "aten.zeros_like.default", last)
    node.args = ([*others, empty], *node.args[1:])
    return [*g.sites(node, "zeros_like", "reduce_scatter_tensor"), *g.readers(node)]


def _first_twice(g: Surgeon) -> list[Site]:
    node = _bucket_of_reductions(g)
    parts = list(node.args[0])
    pairs = [(i, j) for i in range(len(parts)) for j in range(i + 1, len(parts)) if g.alike(parts[i], parts[j])]
    i, j = g.require(pairs, "a bucket with two gradients of one size")
    parts[j] = parts[i]
    node.args = (parts, *node.args[1:])
    return [*g.sites(node, "reduce_scatter_tensor"), *g.readers(node)]


def _parts_reversed(g: Surgeon) -> list[Site]:
    """Packed in one order, unpacked in another."""
    node = _bucket_of_reductions(g)
    node.args = (list(reversed(node.args[0])), *node.args[1:])
    return [*g.sites(node, "reduce_scatter_tensor"), *g.readers(node)]


def _gather(g: Surgeon) -> Call:
    return g.find("all_gather_into_tensor", where=lambda node: node.args[1] > 1)


def _one_row_off(g: Surgeon) -> list[Site]:
    node = _gather(g)
    g.after(g.wait_of(node), "aten.roll.default", [1], [0])
    return [g.site(node, "roll")]


def _gathered_narrow(g: Surgeon) -> list[Site]:
    node = _gather(g)
    narrow = g.before(node, node.args[0], "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    g.before(node, narrow, "aten._to_copy.default", dtype=g.dtype("float32"))
    return g.sites(node, "_to_copy")


def _cast_before_reduction(g: Surgeon) -> list[Site]:
    node = g.find("reduce_scatter_tensor", direction="backward")
    narrow = g.before(node, node.args[0], "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    g.before(node, narrow, "aten._to_copy.default", dtype=g.dtype("float32"))
    return g.sites(node, "_to_copy")


def _freed_early(g: Surgeon) -> list[Site]:
    """The gathered parameter's memory written before backward reads it."""
    again = [x for x in g.calls if g.site(x).operator == "t" and g.site(x).direction == "backward"]
    again = [x for x in again if g.site(x.all_input_nodes[0]).operator == "t"]
    found = [x for x in again if "wait_tensor" in x.all_input_nodes[0].all_input_nodes[0].name]
    node = g.require(found, "a weight that backward reads")
    g.make_before(node, "aten.zero_.default", node.all_input_nodes[0].args[0])
    weight = node.all_input_nodes[0].args[0]
    return [g.site(weight, "zero_"), *g.sites(node, "zero_"), *g.readers(node)]


ENTRIES = (
    Entry(
        name="gathered-parts-exchanged",
        says="two parameters of one size change places in a gathered bucket",
        source="ours: packed by name, unpacked by position",
        edit=_parts_exchanged("split_with_sizes_copy", "forward"),
        needs=(BUCKETS,),
    ),
    Entry(
        name="gathered-bucket-shifted",
        says="a gathered bucket is unpacked one element off",
        source="ours: an offset without its padding",
        edit=_shifted,
        needs=(BUCKETS,),
    ),
    Entry(
        name="reduced-parts-exchanged",
        says="two gradients of one size change places in a reduced bucket",
        source="ours: packed by name, unpacked by position",
        edit=_parts_exchanged("split_with_sizes", "backward"),
        needs=(BUCKETS,),
        kinds=("grad",),
    ),
    Entry(
        name="bucket-forgets-its-last-gradient",
        says="a bucket is reduced before its last gradient is in it",
        source="DeepSpeed #7985: what comes last is not in what is reduced",
        edit=_last_forgotten,
        needs=(BUCKETS,),
        kinds=("grad",),
    ),
    Entry(
        name="bucket-holds-a-gradient-twice",
        says="one gradient lies in two places of a bucket",
        source="ours: both chunks' gradients mapped to one node",
        edit=_first_twice,
        needs=(BUCKETS,),
        kinds=("grad",),
    ),
    Entry(
        name="bucket-packed-in-reverse",
        says="a bucket is packed from the last gradient and unpacked from the first",
        source="ours: two orders of one list",
        edit=_parts_reversed,
        needs=(BUCKETS,),
        kinds=("grad",),
    ),
    Entry(
        name="shards-one-row-off",
        says="a gathered parameter's rows are one off",
        source="ours: shards of uneven size taken for even ones",
        edit=_one_row_off,
        needs=(ranks(2),),
    ),
    Entry(
        name="gathered-in-bfloat16",
        says="a parameter is gathered in bfloat16 for a step in float32",
        source="FSDP's param_dtype",
        edit=_gathered_narrow,
        needs=(FLOAT32,),
    ),
    Entry(
        name="gradient-cast-before-its-reduction",
        says="a gradient is rounded to bfloat16 before it is reduced in float32",
        source="FSDP's reduce_dtype, one cast too early",
        edit=_cast_before_reduction,
        needs=(FLOAT32,),
        kinds=("grad",),
    ),
    Entry(
        name="gathered-parameter-freed-early",
        says="a gathered parameter's memory is written before backward reads it",
        source="ours: resharding after forward, without the gather before backward",
        edit=_freed_early,
        kinds=("grad",),
    ),
)
