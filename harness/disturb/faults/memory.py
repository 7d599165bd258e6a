"""Faults in recomputing or offloading activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.entry import BLOCKS, CHUNKED, EXPERTS, LISTED, OFFLOADS, RECOMPUTES, Site, row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bitproof.harness.disturb.graph_editor import Call, GraphEditor

RELOAD = "reload"


def _find_recomputed(g: GraphEditor, name: str) -> Call:
    found = g.recomputed(name)
    # Chunk 1's, if the step has chunks.
    found = [node for node in found if node.meta.get("chunk") == 1] or found
    return g.require(found, f"a recomputed {name}")


def _sites_in_both_halves(g: GraphEditor, node: Call, *operators: str) -> list[Site]:
    """Return the sites that a report may blame for a changed recomputed call, each in forward and in backward.

    They are the sites of the call, of its readers, and of calls of `operators`, which the edit inserts.
    """
    sites = [*g.sites(node, *operators), *g.readers(node)]
    sites += [
        g.site(read, name) for read in node.all_input_nodes[:1] for name in operators
    ]  # inserted calls have this origin
    return [*sites, *(site._replace(direction="backward") for site in sites)]


@row("ours: a setting that recomputation does not see", needs=(RECOMPUTES,), kinds=("grad",))
def recomputed_with_another_epsilon(g: GraphEditor) -> list[Site]:
    """a norm is recomputed with another epsilon."""
    # A norm adds its epsilon as a number; other additions have two tensors.
    found = [x for x in g.recomputed("add") if isinstance(x.args[1], float)]
    node = g.require(found, "a recomputed norm")
    node.args = (node.args[0], 1e-4)
    return _sites_in_both_halves(g, node)


@row("TTrace's kind: activation recomputation from a wrong input", needs=(RECOMPUTES, CHUNKED), kinds=("grad",))
def recomputed_from_the_other_chunk(g: GraphEditor) -> list[Site]:
    """chunk 1 is recomputed from the values saved by chunk 0."""
    for node in g.recomputed():
        # Views compute nothing that could be blamed.
        if node.meta.get("chunk") == 1 and g.is_floating(node) and "view" not in node.name:
            # An input of the same chunk that is not recomputed was saved by forward.
            saved = [x for x in node.all_input_nodes if x.meta.get("chunk") == 1 and x not in g.recomputed()]
            if saved:
                sites = _sites_in_both_halves(g, node)
                node.replace_input_with(saved[0], g.twin(saved[0]))
                return sites
    return g.require([], "a recomputed call that reads what its chunk saved")


@row("TTrace's kind: a cast that recomputation takes otherwise", needs=(RECOMPUTES,), kinds=("grad",))
def recomputed_in_bfloat16(g: GraphEditor) -> list[Site]:
    """the reciprocal root of a norm is recomputed in bfloat16."""
    node = _find_recomputed(g, "rsqrt")
    narrow = g.after(node, "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    g.after(narrow, "aten._to_copy.default", dtype=g.dtype("float32"))
    return _sites_in_both_halves(g, node, "_to_copy")


@row("ours: decomposed in backward alone", needs=(RECOMPUTES,), kinds=("grad",))
def recomputed_by_another_formula(g: GraphEditor) -> list[Site]:
    """silu is recomputed as x * sigmoid(x)."""
    node = _find_recomputed(g, "silu")
    sites = _sites_in_both_halves(g, node, "sigmoid", "mul")
    g.instead(node, g.kernel("silu_in_two_roundings"), *node.args)
    return sites


@row("torchtitan #1593 and NeMo Automodel #3247", needs=(RECOMPUTES, EXPERTS), kinds=("buffer",))
def recomputation_counts_tokens(g: GraphEditor) -> list[Site]:
    """recomputation counts a chunk's tokens again."""
    node = g.find("add_", r".*moe")
    first = g.require(g.recomputed(), "recomputed calls")
    g.make_before(first, node.target, *node.args)
    # The inserted call has no origin, so reports may name it where its counts are computed.
    sites = [*g.sites(node), g.site(node.args[1], "add_")]
    return [*sites, *(site._replace(direction="backward") for site in sites)]


@row("NeMo Automodel #2635: a recomputed router chooses other experts", needs=(RECOMPUTES, EXPERTS), kinds=("grad",))
def recomputation_routes_otherwise(g: GraphEditor) -> list[Site]:
    """the weights of a token's experts are in another order when they are recomputed."""
    node = _find_recomputed(g, "gather")
    # gather(x, dim, index): the index has a row for each token, with its experts along dim 1.
    g.before(node, node.args[2], "aten.flip.default", [1])
    return _sites_in_both_halves(g, node, "flip")


def _readers_in_backward(g: GraphEditor, node: Call) -> list[Call]:
    again = set(g.recomputed())
    # A recomputed call runs in backward although its origin is in forward.
    return [x for x in node.users if x.op == "call_function" and (x in again or g.site(x).direction == "backward")]


def _saved(g: GraphEditor, name: str, at: str = ".*") -> list[Call]:
    return [node for node in g.all(name, at) if node not in g.recomputed() and _readers_in_backward(g, node)]


def _until_backward(g: GraphEditor, readers: Sequence[Call]) -> list[Site]:
    """Return the sites of `readers`, and of the recomputed calls that depend on them, up to the first calls of
    backward.

    The readers read a wrong activation. A recomputed call that only passes a wrong value on is itself correct, so the
    search may blame a later call.
    """
    sites: list[Site] = []
    seen: set[Call] = set()
    waiting = list(readers)
    while waiting:
        reader = waiting.pop()
        if reader not in seen and reader.op == "call_function":
            seen.add(reader)
            sites += _sites_in_both_halves(g, reader)
            # Recomputed calls keep the direction of the calls that they repeat.
            waiting += reader.users if g.site(reader).direction == "forward" else []
    return sites


def _let_backward_read(g: GraphEditor, node: Call, other: Call) -> list[Site]:
    readers = _readers_in_backward(g, node)
    sites = [*g.sites(node), *_until_backward(g, readers)]
    for reader in readers:
        reader.replace_input_with(node, other)
    return sites


@row(
    "ours: torch.utils.checkpoint keeps results by operator and number of the call, which a call too many shifts",
    needs=(LISTED,),
    kinds=("grad",),
)
def saved_product_of_the_next_call(g: GraphEditor) -> list[Site]:
    """backward reads another matrix product than its own: the one that the next call saved."""
    saved = _saved(g, "mm", r".*attention.*")
    pairs = [(one, other) for i, one in enumerate(saved) for other in saved[i + 1 :] if g.alike(one, other)]
    return _let_backward_read(g, *g.require(pairs, "two saved matrix products of the same shape"))


@row("ours: results kept by operator and layer, which chunks share", needs=(LISTED, BLOCKS), kinds=("grad",))
def saved_attention_of_the_other_chunk(g: GraphEditor) -> list[Site]:
    """backward of chunk 1 reads the attention output that chunk 0 saved."""
    found = [x for x in _saved(g, "getitem") if "attention" in str(x.args[0].target) and g.is_floating(x)]
    node = g.require(found, "attention whose output backward reads")
    return _let_backward_read(g, node, g.twin(node))


@row("ours: a weight's name taken from the call before", needs=(LISTED,), kinds=("grad",))
def recomputed_product_of_the_saved_weight(g: GraphEditor) -> list[Site]:
    """a matrix product is recomputed with the weight of another product, which was saved."""
    for node in g.recomputed("mm"):
        weights = [x.args[1] for x in _saved(g, "mm")]
        # A weight of the same shape, so that only the values are wrong.
        if others := [x for x in weights if x is not node.args[1] and g.alike(x, node.args[1])]:
            sites = _sites_in_both_halves(g, node)
            node.args = (node.args[0], others[0])
            return sites
    return g.require([], "a recomputed matrix product, and a saved one with a weight of its shape")


@row("ours: host buffers by shape", needs=(OFFLOADS,), kinds=("grad",))
def another_activation_reloaded(g: GraphEditor) -> list[Site]:
    """when an activation returns from host memory, another activation takes its place."""
    waits = [x for x in g.calls if str(x.target).startswith("bitproof.wait_reload") and g.is_floating(x)]
    pairs = [(one, other) for i, one in enumerate(waits) for other in waits[i + 1 :] if g.alike(one, other)]
    one, other = g.require(pairs, "two offloaded activations of one shape")
    sites = [*g.sites(other), *g.readers(other), g.site(other, RELOAD)]
    launch = other.all_input_nodes[0]
    # The reload then reads the host copy of the other activation.
    launch.args = (one.all_input_nodes[0].args[0], *launch.args[1:])
    return [*sites, *(site for user in other.users for site in g.readers(user))]


@row("ours: half the bytes", needs=(OFFLOADS,), kinds=("grad",))
def offloaded_in_bfloat16(g: GraphEditor) -> list[Site]:
    """an activation in float32 is offloaded in bfloat16."""
    found = [x for x in g.calls if str(x.target).startswith("bitproof.offload") and g.is_floating(x)]
    wide = [x for x in found if str(g.value(x).dtype) == "torch.float32"]
    node = g.require(wide, "an offloaded activation in float32")
    # Cast back, so that the host copy keeps its dtype and size.
    narrow = g.before(node, node.args[0], "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    g.before(node, narrow, "aten._to_copy.default", dtype=g.dtype("float32"))
    return [g.site(node, "_to_copy")]


@row(
    "ours: a host buffer that is reused too early, as pytorch #108811 has it on the device",
    needs=(OFFLOADS,),
    kinds=("grad",),
)
def host_buffer_overwritten(g: GraphEditor) -> list[Site]:
    """an activation's host memory is overwritten before its reload."""
    found = [x for x in g.calls if str(x.target).startswith("bitproof.reload") and g.is_floating(x)]
    node = g.require(found, "an offloaded activation")
    g.make_before(node, "aten.zero_.default", node.args[0])
    places = [g.site(node, name) for name in ("zero_", RELOAD)]
    return [*places, *(site._replace(direction="forward") for site in places)]


def _copies(g: GraphEditor, name: str) -> list[Call]:
    return [x for x in g.calls if str(x.target).startswith(f"bitproof.{name}.") and g.is_floating(x)]


def _in_flight_together(g: GraphEditor, name: str, at: Callable[[Call], Call]) -> tuple[Call, Call]:
    """Return a pair of copies of the same shape: the second is started before the wait for the first.

    `at` returns the call that waits for a copy.
    """
    place = {node: index for index, node in enumerate(g.graph.nodes)}
    copies = _copies(g, name)
    pairs = [
        (one, other)
        for one in copies
        for other in copies
        if place[one] < place[other] < place[at(one)] and g.alike(one, other)
    ]
    found: tuple[Call, Call] = g.require(pairs, f"two activations of the same shape, the {name} of both in flight")
    return found


def _overwrite(g: GraphEditor, one: Call, other: Call) -> list[Site]:
    sites = [g.site(one), *_until_backward(g, list(one.users)), g.site(one, "copy_"), g.site(other, "copy_")]
    # `one` is still in flight, and receives what `other` copies.
    g.make_before(other, "aten.copy_.default", one, other.args[0])
    return [*sites, *(site._replace(direction="backward") for site in sites)]


@row("ours: a pool of as many buffers as reloads are ahead, one too few", needs=(OFFLOADS,), kinds=("grad",))
def prefetched_into_a_buffer_in_use(g: GraphEditor) -> list[Site]:
    """an activation returns from host memory into the buffer of another activation that backward has not read yet."""
    one, other = _in_flight_together(g, "reload", lambda copy: next(iter(copy.users)))
    return _overwrite(g, one, other)


@row("ours: a pool of as many host buffers as waits are deferred, one too few", needs=(OFFLOADS,), kinds=("grad",))
def offloaded_into_a_buffer_in_use(g: GraphEditor) -> list[Site]:
    """an activation is copied into the host buffer of another activation whose copy is still in flight."""
    one, other = _in_flight_together(g, "offload", lambda copy: next(iter(copy.users)))
    return _overwrite(g, one, other)
