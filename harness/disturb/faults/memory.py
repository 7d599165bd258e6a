"""Faults in recomputing or offloading activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.entry import CHUNKED, EXPERTS, OFFLOADS, RECOMPUTES, Site, row

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import Call, GraphEditor

RELOAD = "reload"


def _find_recomputed(g: GraphEditor, name: str) -> Call:
    found = g.recomputed(name)
    # Chunk 1's, if the step has chunks.
    found = [node for node in found if node.meta.get("chunk") == 1] or found
    return g.require(found, f"a recomputed {name}")


def _sites_in_both_halves(g: GraphEditor, node: Call, *operators: str) -> list[Site]:
    """The call sites that blame may name for a changed recomputed call: its own, those of its readers, and those of
    `operators`, which the edit inserts. Each is listed in forward and in backward."""
    sites = [*g.sites(node, *operators), *g.readers(node)]
    sites += [
        g.site(read, name) for read in node.all_input_nodes[:1] for name in operators
    ]  # inserted calls have this origin
    return [*sites, *(site._replace(direction="backward") for site in sites)]


@row("ours: a setting that recomputation does not see", needs=(RECOMPUTES,), kinds=("grad",))
def recomputed_with_another_epsilon(g: GraphEditor) -> list[Site]:
    """a norm is recomputed with another epsilon."""
    found = [x for x in g.recomputed("add") if isinstance(x.args[1], float)]
    node = g.require(found, "a recomputed norm")
    node.args = (node.args[0], 1e-4)
    return _sites_in_both_halves(g, node)


@row("TTrace's kind: activation recomputation from a wrong input", needs=(RECOMPUTES, CHUNKED), kinds=("grad",))
def recomputed_from_the_other_chunk(g: GraphEditor) -> list[Site]:
    """chunk 1 is recomputed from the values saved by chunk 0."""
    for node in g.recomputed():
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
    sites = [*g.sites(node), g.site(node.args[1], "add_")]
    return [*sites, *(site._replace(direction="backward") for site in sites)]


@row("NeMo Automodel #2635: a recomputed router chooses other experts", needs=(RECOMPUTES, EXPERTS), kinds=("grad",))
def recomputation_routes_otherwise(g: GraphEditor) -> list[Site]:
    """recomputed weights have a token's slots in another order."""
    node = _find_recomputed(g, "gather")
    g.before(node, node.args[2], "aten.flip.default", [1])
    return _sites_in_both_halves(g, node, "flip")


@row("ours: host buffers by shape", needs=(OFFLOADS,), kinds=("grad",))
def another_activation_reloaded(g: GraphEditor) -> list[Site]:
    """an activation is replaced by another when it returns from host memory."""
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
