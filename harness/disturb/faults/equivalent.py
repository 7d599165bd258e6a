"""Rewrites that keep every bit: none of them may be flagged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.faults.entry import BFLOAT16, CHUNKED, EXPERTS, Entry, Family, Site, ranks

if TYPE_CHECKING:
    from bitproof.harness.disturb.faults.surgeon import Call, Surgeon
    from bitproof.harness.disturb.faults.tamper import TamperedCall

FAMILY: Family = "equivalent"

EXACT = "ours: exact arithmetic, element by element"


def _activation(g: Surgeon) -> Call:
    return g.find("silu")


def _copied(g: Surgeon) -> list[Site]:
    g.after(_activation(g), "aten.clone.default")
    return []


def _reshaped(g: Surgeon) -> list[Site]:
    node = _activation(g)
    flat = g.after(node, "aten.reshape.default", [-1])
    width = g.value(node).shape[-1]
    g.after(flat, "aten.reshape.default", [-1, int(width)])
    return []


def _summands_exchanged(g: Surgeon) -> list[Site]:
    for node in [*g.all("add", direction="backward"), *g.all("add")]:
        if len(node.all_input_nodes) == 2 and g.is_floating(node):
            node.args = (node.args[1], node.args[0])
    return []


def _factors_exchanged(g: Surgeon) -> list[Site]:
    for node in [*g.all("mul", direction="backward"), *g.all("mul")]:
        if len(node.all_input_nodes) == 2 and g.is_floating(node):
            node.args = (node.args[1], node.args[0])
    return []


def _waits_late(g: Surgeon) -> list[Site]:
    place = {node: index for index, node in enumerate(g.graph.nodes)}
    for wait in g.calls:
        if "wait_tensor" in str(wait.target) and wait.users:
            min(wait.users, key=place.__getitem__).prepend(wait)
    return []


def _gathers_early(g: Surgeon) -> list[Site]:
    """All casts and all-gathers of parameters first, in their order: every rank launches them alike."""
    moved = []
    for node in [node for node in g.calls if "all_gather" in str(node.target)]:
        source = node.all_input_nodes[0]
        if source.op == "placeholder":
            moved.append(node)
        elif source.all_input_nodes and source.all_input_nodes[0].op == "placeholder":
            moved += [source, node]
    last = g.graph.find_nodes(op="placeholder")[-1]
    for node in dict.fromkeys(moved):
        last.append(node)
        last = node
    return []


def _cut_and_joined(g: Surgeon) -> list[Site]:
    node = g.find("mm", direction="forward")
    rows = int(g.value(node).shape[0])
    readers = list(node.users)
    head = g.make_before(node.next, "aten.slice.Tensor", node, 0, 0, rows // 2)
    tail = g.make_before(head.next, "aten.slice.Tensor", node, 0, rows // 2, rows)
    joined = g.make_before(tail.next, "aten.cat.default", [head, tail])
    for reader in readers:
        reader.replace_input_with(node, joined)
    return []


def _negated_twice(g: Surgeon) -> list[Site]:
    g.after(g.after(_activation(g), "aten.neg.default"), "aten.neg.default")
    return []


def _times_one(g: Surgeon) -> list[Site]:
    g.after(_activation(g), "aten.mul.Scalar", 1.0)
    return []


def _doubled_and_halved(g: Surgeon) -> list[Site]:
    g.after(g.after(_activation(g), "aten.mul.Scalar", 2.0), "aten.mul.Scalar", 0.5)
    return []


def _widened_and_narrowed(g: Surgeon) -> list[Site]:
    wide = g.after(_activation(g), "aten._to_copy.default", dtype=g.dtype("float32"))
    g.after(wide, "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    return []


def _computed_twice(g: Surgeon) -> list[Site]:
    node = _activation(g)
    again = g.make_before(node, node.target, *node.args, **node.kwargs)
    reader = list(node.users)[-1]
    reader.replace_input_with(node, again)
    return []


def _dead_call(g: Surgeon) -> list[Site]:
    g.make_before(_activation(g).next, "aten.exp.default", _activation(g))
    return []


def _subtracted_negative(g: Surgeon) -> list[Site]:
    node = g.find("add", where=lambda node: len(node.all_input_nodes) == 2 and g.is_floating(node))
    negative = g.make_before(node, "aten.neg.default", node.args[1])
    g.instead(node, "aten.sub.Tensor", node.args[0], negative)
    return []


def _transposed_twice(g: Surgeon) -> list[Site]:
    node = g.find("mm")
    g.after(g.after(node, "aten.t.default"), "aten.t.default")
    return []


def _in_place(g: Surgeon) -> list[Site]:
    node = _activation(g)
    copy = g.make_before(node, "aten.clone.default", node.args[0])
    g.instead(node, "aten.silu_.default", copy)
    return []


def _reversed_twice(g: Surgeon) -> list[Site]:
    g.after(g.after(_activation(g), "aten.flip.default", [0]), "aten.flip.default", [0])
    return []


def _late_cast(g: Surgeon) -> list[Site]:
    """A parameter gathered in float32 and cast after, where it is cast and then gathered."""
    node = g.find("all_gather_into_tensor", where=lambda node: "_to_copy" in str(node.args[0]))
    cast, wait = node.args[0], g.wait_of(node)
    node.args = (cast.args[0], *node.args[1:])
    g.after(wait, "aten._to_copy.default", **cast.kwargs)
    return []


def _reduced_whole(g: Surgeon) -> list[Site]:
    """A reduce-scatter as an all-reduce of which this rank's rows are kept: the same sums, in the same order."""
    node = g.find("reduce_scatter_tensor", direction="backward")
    wait = g.wait_of(node)
    whole = g.make_before(node, "_c10d_functional.all_reduce.default", node.args[0], "sum", node.args[3])
    done = g.make_before(wait, "_c10d_functional.wait_tensor.default", whole)
    g.instead(wait, g.kernel("own_rows"), done, node.args[2])
    g.graph.erase_node(node)
    return []


def _counts_in_float64(g: Surgeon) -> list[Site]:
    node = g.find("sum", ".*router", where=lambda node: not g.is_floating(node))
    wide = g.after(node, "aten._to_copy.default", dtype=g.dtype("float64"))
    g.after(wide, "aten._to_copy.default", dtype=g.dtype("int64"))
    return []


def _late_on_one_rank(g: Surgeon) -> list[Site]:
    node = g.find("reduce_scatter_tensor", direction="backward")
    g.before(node, node.args[0], g.kernel("slept_on_last_rank"))
    return []


def _joined_by_stacking(g: Surgeon) -> list[Site]:
    """Parts joined in two steps where the graph joins them in one."""
    node = g.require(g.joins(), "chunks that are joined")
    first, second = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    size = g.value(second).shape[dim]
    head = g.make_before(node, "aten.slice.Tensor", second, dim, 0, int(size) // 2)
    tail = g.make_before(node, "aten.slice.Tensor", second, dim, int(size) // 2, int(size))
    joined = g.make_before(node, "aten.cat.default", [first, head], dim)
    node.args = ([joined, tail], *node.args[1:])
    return []


def _parameter_by_parameter(call: TamperedCall) -> Any:
    """One fused call a parameter, from the last to the first, where there is one call for all."""
    lists = [value for value in call.args if isinstance(value, (list, tuple))]
    for index in reversed(range(len(lists[0]))):
        args = [[value[index]] if isinstance(value, (list, tuple)) and value else value for value in call.args]
        call.function(*args, **call.kwargs)
    call.fire()


ENTRIES = (
    Entry(name="activation-copied", says="an activation is copied", source=EXACT, edit=_copied),
    Entry(
        name="activation-reshaped-and-back", says="an activation is flattened and back", source=EXACT, edit=_reshaped
    ),
    Entry(name="summands-exchanged", says="a + b is b + a, everywhere", source=EXACT, edit=_summands_exchanged),
    Entry(name="factors-exchanged", says="a * b is b * a, everywhere", source=EXACT, edit=_factors_exchanged),
    Entry(
        name="waits-moved-late",
        says="each collective is waited for where its result is first read",
        source="torchtitan #3434: what an overlap schedule does",
        edit=_waits_late,
    ),
    Entry(
        name="gathers-moved-early",
        says="parameters are gathered before anything else",
        source="ours: prefetching",
        edit=_gathers_early,
    ),
    Entry(
        name="product-cut-and-joined",
        says="a product's rows are cut and joined",
        source=EXACT,
        edit=_cut_and_joined,
    ),
    Entry(name="negated-twice", says="an activation is negated twice", source=EXACT, edit=_negated_twice),
    Entry(name="multiplied-by-one", says="an activation is multiplied by 1", source=EXACT, edit=_times_one),
    Entry(
        name="doubled-and-halved",
        says="an activation is doubled and halved",
        source=EXACT,
        edit=_doubled_and_halved,
    ),
    Entry(
        name="widened-and-narrowed",
        says="an activation in bfloat16 goes through float32",
        source=EXACT,
        edit=_widened_and_narrowed,
        needs=(BFLOAT16,),
    ),
    Entry(
        name="computed-twice",
        says="an activation's last reader reads a second computation of it",
        source="ours: recomputation",
        edit=_computed_twice,
    ),
    Entry(name="dead-call", says="something is computed that nobody reads", source="ours", edit=_dead_call),
    Entry(name="negative-subtracted", says="a + b is a - (-b)", source=EXACT, edit=_subtracted_negative),
    Entry(name="transposed-twice", says="a product is transposed twice", source=EXACT, edit=_transposed_twice),
    Entry(name="activation-in-place", says="silu is taken in place, of a copy", source=EXACT, edit=_in_place),
    Entry(name="rows-reversed-twice", says="rows are reversed twice", source=EXACT, edit=_reversed_twice),
    Entry(
        name="cast-after-the-gather",
        says="a parameter is gathered in float32 and cast then",
        source="FSDP with and without casting before communication",
        edit=_late_cast,
        needs=(BFLOAT16,),
    ),
    Entry(
        name="all-reduce-for-reduce-scatter",
        says="a gradient is summed whole on every rank, in rank order, and its rows kept",
        source="ours: DDP against FSDP",
        edit=_reduced_whole,
        needs=(ranks(2),),
    ),
    Entry(
        name="counts-through-float64",
        says="integer counts go through float64",
        source=EXACT,
        edit=_counts_in_float64,
        needs=(EXPERTS,),
    ),
    Entry(
        name="late-on-one-rank",
        says="the last rank is late for a collective",
        source="ours: only time differs",
        edit=_late_on_one_rank,
        needs=(ranks(2),),
    ),
    Entry(
        name="joined-in-two-steps",
        says="chunks are joined in two steps",
        source=EXACT,
        edit=_joined_by_stacking,
        needs=(CHUNKED,),
    ),
    Entry(
        name="optimizer-one-parameter-a-call",
        says="AdamW takes one call a parameter, from the last",
        source="ours: foreach against single tensors",
        call=_parameter_by_parameter,
        operators=("_fused_adamw_",),
    ),
)
