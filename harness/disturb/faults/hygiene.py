"""Faults in a pass that edits a graph: aliases, mutations, merged calls, views."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from bitproof.harness.disturb.entry import Need, Site, row

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import GraphEditor

ATTENDS = Need(lambda case: case.model.family == "deepseek_v3" and case.model.attention == "sdpa", "latent attention")
REUSE = "pytorch #108811: memory that is written while it is still to be read"


@row(REUSE, kinds=("grad",))
def activation_overwritten_in_place(g: GraphEditor) -> list[Site]:
    """silu overwrites in place a value that backward reads."""
    # If nothing in backward read silu's input, overwriting it would change no bit.
    node = g.find("silu", where=lambda node: any("backward" in user.name for user in node.args[0].users))
    sites = g.sites(node, "silu_")
    # Backward reads the overwritten value, so blame may name its calls.
    readers = [g.site(user) for user in node.args[0].users if "backward" in user.name]
    g.instead(node, "aten.silu_.default", node.args[0])
    return [*sites, *readers]


@row(REUSE)
def activation_freed_early(g: GraphEditor) -> list[Site]:
    """an activation's memory is overwritten before its last reader."""
    node = g.find("silu")
    last = next(user for user in reversed(list(node.users)) if "mul" in user.name)
    g.make_before(last, "aten.zero_.default", node)
    return [g.site(node, "zero_"), g.site(last)]


@row("ours: common subexpressions distinguished by operator and shape alone")
def unlike_tables_merged(g: GraphEditor) -> list[Site]:
    """rotary embedding reads cosines in place of sines."""
    # The first `index` reads the table of cosines, the second that of sines.
    one, other = (g.find("index", r".*rope", turn=turn) for turn in (0, 1))
    sites = [*g.sites(other), *g.readers(other), *(site for user in other.users for site in g.readers(user))]
    g.bypass(other, one)
    return sites


@row("ours: common subexpressions distinguished by operator and shape alone")
def unlike_norms_merged(g: GraphEditor) -> list[Site]:
    """two norms share the same root mean square."""
    found = g.all("rsqrt", r".*norm")
    # Neighbours in the order of the graph, so the first result exists when the second is read.
    pairs = [pair for pair in itertools.pairwise(found) if g.alike(*pair)]
    one, other = g.require(pairs, "two norms of one shape")
    sites = [*g.sites(other), *g.readers(other)]
    g.bypass(other, one)
    return sites


@row("ours: transposes that cancel, miscounted")
def weight_not_transposed(g: GraphEditor) -> list[Site]:
    """a square weight is read without its transpose."""

    def is_square(node: object) -> bool:
        value = g.value(node)
        return value is not None and value.dim() == 2 and value.shape[0] == value.shape[1]

    # Only a square weight has the same shape with and without its transpose.
    node = g.find("t", r".*\.w.*", where=is_square)
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.all_input_nodes[0])
    return sites


@row("ours: a view of what was not contiguous", needs=(ATTENDS,))
def heads_scrambled(g: GraphEditor) -> list[Site]:
    """attention heads are joined without the preceding transpose."""
    # For its error: without such a call, the graph has no heads to join.
    node = g.find("transpose", r".*attention", where=lambda node: "getitem" in str(node.args[0]))
    found = [x for x in g.all("transpose", r".*attention") if any("view" in user.name for user in x.users)]
    node = g.require(found, "attention whose heads are put together")
    shape = [int(size) for size in g.value(node).shape]
    sites = [*g.sites(node, "reshape", "clone", "view", "_unsafe_view"), *g.readers(node)]
    sites += [site for user in node.users for site in g.readers(user)]
    g.instead(node, "aten.reshape.default", node.args[0], shape)
    return sites


@row("ours: two results of one call", needs=(ATTENDS,))
def parts_exchanged(g: GraphEditor) -> list[Site]:
    """the rotated and unrotated parts of a query are exchanged."""
    # Parts of different sizes could not be exchanged without an error.
    node = g.find("split_with_sizes", r".*attention", where=lambda node: len(set(node.args[1])) == 1)
    for part in list(node.users):
        # `getitem(node, index)`, with the indices 0 and 1 exchanged.
        part.args = (node, 1 - part.args[1])
    parts = list(node.users)
    readers = [site for part in parts for site in g.readers(part)]
    return [*g.sites(node), *readers, *(g.site(part) for part in parts)]


@row("ours: a rule for sums applied to differences")
def operands_exchanged(g: GraphEditor) -> list[Site]:
    """a difference a - b becomes b - a."""
    node = g.find("sub", r".*rope")
    node.args = (node.args[1], node.args[0])
    return g.sites(node)


@row("ours: inputs in another order")
def parameter_of_another(g: GraphEditor) -> list[Site]:
    """a module reads another module's parameter of the same shape."""
    # The first calls that read a parameter, such as its cast.
    casts = [x for x in g.calls if x.all_input_nodes[:1] and x.all_input_nodes[0].op == "placeholder"]
    casts = [x for x in casts if g.is_floating(x)]
    pairs = [
        (one, other)
        for i, one in enumerate(casts)
        for other in casts[i + 1 :]
        if one.args[0] is not other.args[0] and g.alike(one.args[0], other.args[0]) and len(one.args) == len(other.args)
    ]
    pairs = [(one, other) for one, other in pairs if "embedding" not in str(g.site(one).module)] or pairs
    one, other = g.require(pairs, "two parameters of one shape")
    other.args = (one.args[0], *other.args[1:])
    # With several ranks, modules read the parameter through its all-gather.
    gathers = [user for user in other.users if "all_gather" in user.name]
    later = [g.wait_of(user) for user in gathers]
    readers = [site for wait in later for user in wait.users for site in (g.site(user), *g.readers(user))]
    return [*g.sites(other), *g.readers(other), *readers]


@row("ours: a simplification that takes a factor for 1", kinds=("grad",))
def constant_factor_dropped(g: GraphEditor) -> list[Site]:
    """a constant factor of a norm's gradient is lost."""
    node = g.find("mul", r".*norm", direction="backward", where=lambda node: isinstance(node.args[1], float))
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


@row("ours: rows joined along one dim and reshaped where they are to be transposed", kinds=("grad",))
def viewed_for_transposed(g: GraphEditor) -> list[Site]:
    """a weight gradient is reshaped where it should be transposed."""
    node = g.find("t", direction="backward", where=lambda node: "mm" in str(node.args[0]))
    shape = [int(size) for size in reversed(g.value(node.args[0]).shape)]
    sites = [*g.sites(node, "view", "reshape"), *g.readers(node)]
    sites += [site for user in node.users for site in g.readers(user)]
    sites += [site for user in node.users for reader in user.users for site in g.readers(reader)]
    g.instead(node, "aten.reshape.default", node.args[0], shape)
    return sites
