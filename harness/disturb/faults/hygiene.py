"""What goes wrong where a pass edits a graph: aliases, mutations, merged calls, views."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from bitproof.harness.disturb.faults.entry import Entry, Family, Need, Site

if TYPE_CHECKING:
    from bitproof.harness.disturb.faults.surgeon import Surgeon

FAMILY: Family = "hygiene"

ATTENDS = Need(lambda case: case.model.family == "deepseek_v3" and case.model.attention == "sdpa", "latent attention")
REUSE = "pytorch #108811: memory that is written while it is still to be read"


def _overwritten(g: Surgeon) -> list[Site]:
    """silu in place of a value that backward reads."""
    node = g.find("silu", where=lambda node: any("backward" in user.name for user in node.args[0].users))
    sites = g.sites(node, "silu_")
    readers = [g.site(user) for user in node.args[0].users if "backward" in user.name]
    g.instead(node, "aten.silu_.default", node.args[0])
    return [*sites, *readers]


def _zeroed_early(g: Surgeon) -> list[Site]:
    """A saved activation is freed, and its memory written, before backward reads it."""
    node = g.find("silu")
    last = next(user for user in reversed(list(node.users)) if "mul" in user.name)
    g.make_before(last, "aten.zero_.default", node)
    return [g.site(node, "zero_"), g.site(last)]


def _merged_tables(g: Surgeon) -> list[Site]:
    one, other = (g.find("index", r".*rope", turn=turn) for turn in (0, 1))
    sites = [*g.sites(other), *g.readers(other), *(site for user in other.users for site in g.readers(user))]
    g.bypass(other, one)
    return sites


def _merged_norms(g: Surgeon) -> list[Site]:
    """Two norms' means, equal in operator and shape, taken for one."""
    found = g.all("rsqrt", r".*norm")
    pairs = [pair for pair in itertools.pairwise(found) if g.alike(*pair)]
    one, other = g.require(pairs, "two norms of one shape")
    sites = [*g.sites(other), *g.readers(other)]
    g.bypass(other, one)
    return sites


def _not_transposed(g: Surgeon) -> list[Site]:
    """A square weight, whose transpose has its own shape."""

    def is_square(node: object) -> bool:
        value = g.value(node)
        return value is not None and value.dim() == 2 and value.shape[0] == value.shape[1]

    node = g.find("t", r".*\.w.*", where=is_square)
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.all_input_nodes[0])
    return sites


def _heads_scrambled(g: Surgeon) -> list[Site]:
    """Heads and positions exchanged where the transpose before a view is lost."""
    node = g.find("transpose", r".*attention", where=lambda node: "getitem" in str(node.args[0]))
    found = [x for x in g.all("transpose", r".*attention") if any("view" in user.name for user in x.users)]
    node = g.require(found, "attention whose heads are put together")
    shape = [int(size) for size in g.value(node).shape]
    sites = [*g.sites(node, "reshape", "clone", "view", "_unsafe_view"), *g.readers(node)]
    sites += [site for user in node.users for site in g.readers(user)]
    g.instead(node, "aten.reshape.default", node.args[0], shape)
    return sites


def _parts_exchanged(g: Surgeon) -> list[Site]:
    """The parts of a query with and without position, of one width."""
    node = g.find("split_with_sizes", r".*attention", where=lambda node: len(set(node.args[1])) == 1)
    for part in list(node.users):
        part.args = (node, 1 - part.args[1])
    parts = list(node.users)
    readers = [site for part in parts for site in g.readers(part)]
    return [*g.sites(node), *readers, *(g.site(part) for part in parts)]


def _operands_exchanged(g: Surgeon) -> list[Site]:
    node = g.find("sub", r".*rope")
    node.args = (node.args[1], node.args[0])
    return g.sites(node)


def _parameter_of_another(g: Surgeon) -> list[Site]:
    """A cast reads another parameter of the same shape."""
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
    gathers = [user for user in other.users if "all_gather" in user.name]
    later = [g.wait_of(user) for user in gathers]
    readers = [site for wait in later for user in wait.users for site in (g.site(user), *g.readers(user))]
    return [*g.sites(other), *g.readers(other), *readers]


def _scale_dropped(g: Surgeon) -> list[Site]:
    node = g.find("mul", r".*norm", direction="backward", where=lambda node: isinstance(node.args[1], float))
    sites = [*g.sites(node), *g.readers(node)]
    g.bypass(node, node.args[0])
    return sites


def _shape_of_the_transpose(g: Surgeon) -> list[Site]:
    """A product's transpose is viewed, not transposed."""
    node = g.find("t", direction="backward", where=lambda node: "mm" in str(node.args[0]))
    shape = [int(size) for size in reversed(g.value(node.args[0]).shape)]
    sites = [*g.sites(node, "view", "reshape"), *g.readers(node)]
    sites += [site for user in node.users for site in g.readers(user)]
    sites += [site for user in node.users for reader in user.users for site in g.readers(reader)]
    g.instead(node, "aten.reshape.default", node.args[0], shape)
    return sites


ENTRIES = (
    Entry(
        name="activation-overwritten-in-place",
        says="silu is taken in place of what backward reads",
        source=REUSE,
        edit=_overwritten,
        kinds=("grad",),
    ),
    Entry(
        name="activation-freed-early",
        says="an activation's memory is written before its last reader",
        source=REUSE,
        edit=_zeroed_early,
    ),
    Entry(
        name="unlike-tables-merged",
        says="sines are read from the table of cosines",
        source="ours: common subexpressions told apart by operator and shape alone",
        edit=_merged_tables,
    ),
    Entry(
        name="unlike-norms-merged",
        says="two norms share one's root mean square",
        source="ours: common subexpressions told apart by operator and shape alone",
        edit=_merged_norms,
    ),
    Entry(
        name="weight-not-transposed",
        says="a square weight is read without its transpose",
        source="ours: transposes that cancel, miscounted",
        edit=_not_transposed,
    ),
    Entry(
        name="heads-scrambled",
        says="heads are put together without the transpose before",
        source="ours: a view of what was not contiguous",
        edit=_heads_scrambled,
        needs=(ATTENDS,),
    ),
    Entry(
        name="parts-exchanged",
        says="of a query, the part that is rotated and the part that is not are exchanged",
        source="ours: two results of one call",
        edit=_parts_exchanged,
        needs=(ATTENDS,),
    ),
    Entry(
        name="operands-exchanged",
        says="a difference is taken the other way round",
        source="ours: a rule for sums applied to differences",
        edit=_operands_exchanged,
    ),
    Entry(
        name="parameter-of-another",
        says="a module reads another one's parameter of the same shape",
        source="ours: inputs in another order",
        edit=_parameter_of_another,
    ),
    Entry(
        name="constant-factor-dropped",
        says="a constant factor of a norm's gradient is lost",
        source="ours: a simplification that takes a factor for 1",
        edit=_scale_dropped,
        kinds=("grad",),
    ),
    Entry(
        name="viewed-for-transposed",
        says="a weight gradient has the transpose's shape, and its own order of elements",
        source="ours: rows joined along one dim and reshaped where they are to be transposed",
        edit=_shape_of_the_transpose,
        kinds=("grad",),
    ),
)
