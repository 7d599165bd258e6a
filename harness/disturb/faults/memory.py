"""What goes wrong where activations are computed again, or kept elsewhere meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.disturb.faults.entry import CHUNKED, EXPERTS, OFFLOADS, RECOMPUTES, Entry, Family, Site

if TYPE_CHECKING:
    from bitproof.harness.disturb.faults.surgeon import Call, Surgeon

FAMILY: Family = "memory"

RELOAD = "reload"


def _again(g: Surgeon, name: str) -> Call:
    """A recomputed call, of chunk 1 where there is one."""
    found = g.recomputed(name)
    found = [node for node in found if node.meta.get("chunk") == 1] or found
    return g.require(found, f"a recomputed {name}")


def _both(g: Surgeon, node: Call, *operators: str) -> list[Site]:
    """A recomputed call's places: it repeats forward, for backward."""
    sites = [*g.sites(node, *operators), *g.readers(node)]
    sites += [g.site(read, name) for read in node.all_input_nodes[:1] for name in operators]  # what is new lies there
    return [*sites, *(site._replace(direction="backward") for site in sites)]


def _other_epsilon(g: Surgeon) -> list[Site]:
    found = [x for x in g.recomputed("add") if isinstance(x.args[1], float)]
    node = g.require(found, "a recomputed norm")
    node.args = (node.args[0], 1e-4)
    return _both(g, node)


def _other_chunk(g: Surgeon) -> list[Site]:
    for node in g.recomputed():
        if node.meta.get("chunk") == 1 and g.is_floating(node) and "view" not in node.name:
            saved = [x for x in node.all_input_nodes if x.meta.get("chunk") == 1 and x not in g.recomputed()]
            if saved:
                sites = _both(g, node)
                node.replace_input_with(saved[0], g.twin(saved[0]))
                return sites
    return g.require([], "a recomputed call that reads what its chunk saved")


def _in_bfloat16(g: Surgeon) -> list[Site]:
    node = _again(g, "rsqrt")
    narrow = g.after(node, "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    g.after(narrow, "aten._to_copy.default", dtype=g.dtype("float32"))
    return _both(g, node, "_to_copy")


def _other_formula(g: Surgeon) -> list[Site]:
    node = _again(g, "silu")
    sites = _both(g, node, "sigmoid", "mul")
    g.instead(node, g.kernel("silu_in_two_roundings"), *node.args)
    return sites


def _counted_again(g: Surgeon) -> list[Site]:
    node = g.find("add_", r".*moe")
    first = g.require(g.recomputed(), "recomputed calls")
    g.make_before(first, node.target, *node.args)
    sites = [*g.sites(node), g.site(node.args[1], "add_")]
    return [*sites, *(site._replace(direction="backward") for site in sites)]


def _routed_otherwise(g: Surgeon) -> list[Site]:
    node = _again(g, "gather")
    g.before(node, node.args[2], "aten.flip.default", [1])
    return _both(g, node, "flip")


def _loads_another(g: Surgeon) -> list[Site]:
    waits = [x for x in g.calls if str(x.target).startswith("bitproof.wait_reload") and g.is_floating(x)]
    pairs = [(one, other) for i, one in enumerate(waits) for other in waits[i + 1 :] if g.alike(one, other)]
    one, other = g.require(pairs, "two offloaded activations of one shape")
    sites = [*g.sites(other), *g.readers(other), g.site(other, RELOAD)]
    launch = other.all_input_nodes[0]
    launch.args = (one.all_input_nodes[0].args[0], *launch.args[1:])
    return [*sites, *(site for user in other.users for site in g.readers(user))]


def _offloaded_narrow(g: Surgeon) -> list[Site]:
    found = [x for x in g.calls if str(x.target).startswith("bitproof.offload") and g.is_floating(x)]
    wide = [x for x in found if str(g.value(x).dtype) == "torch.float32"]
    node = g.require(wide, "an offloaded activation in float32")
    narrow = g.before(node, node.args[0], "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    g.before(node, narrow, "aten._to_copy.default", dtype=g.dtype("float32"))
    return [g.site(node, "_to_copy")]


def _host_overwritten(g: Surgeon) -> list[Site]:
    found = [x for x in g.calls if str(x.target).startswith("bitproof.reload") and g.is_floating(x)]
    node = g.require(found, "an offloaded activation")
    g.make_before(node, "aten.zero_.default", node.args[0])
    places = [g.site(node, name) for name in ("zero_", RELOAD)]
    return [*places, *(site._replace(direction="forward") for site in places)]


ENTRIES = (
    Entry(
        name="recomputed-with-another-epsilon",
        says="a norm is computed again with another epsilon",
        source="ours: a setting that recomputation does not see",
        edit=_other_epsilon,
        needs=(RECOMPUTES,),
        kinds=("grad",),
    ),
    Entry(
        name="recomputed-from-the-other-chunk",
        says="chunk 1's recomputation starts from what chunk 0 saved",
        source="TTrace's kind: activation recomputation from a wrong input",
        edit=_other_chunk,
        needs=(RECOMPUTES, CHUNKED),
        kinds=("grad",),
    ),
    Entry(
        name="recomputed-in-bfloat16",
        says="a root is computed again in bfloat16",
        source="TTrace's kind: a cast that recomputation takes otherwise",
        edit=_in_bfloat16,
        needs=(RECOMPUTES,),
        kinds=("grad",),
    ),
    Entry(
        name="recomputed-by-another-formula",
        says="silu is computed again as x times sigmoid(x)",
        source="ours: decomposed in backward alone",
        edit=_other_formula,
        needs=(RECOMPUTES,),
        kinds=("grad",),
    ),
    Entry(
        name="recomputation-counts-tokens",
        says="recomputation counts a chunk's tokens again",
        source="torchtitan #1593 and NeMo Automodel #3247",
        edit=_counted_again,
        needs=(RECOMPUTES, EXPERTS),
        kinds=("buffer",),
    ),
    Entry(
        name="recomputation-routes-otherwise",
        says="recomputed weights are those of a token's slots in another order",
        source="NeMo Automodel #2635: a recomputed router chooses other experts",
        edit=_routed_otherwise,
        needs=(RECOMPUTES, EXPERTS),
        kinds=("grad",),
    ),
    Entry(
        name="another-activation-reloaded",
        says="one activation comes back from host memory in place of another",
        source="ours: host buffers by shape",
        edit=_loads_another,
        needs=(OFFLOADS,),
        kinds=("grad",),
    ),
    Entry(
        name="offloaded-in-bfloat16",
        says="an activation in float32 is kept in bfloat16 meanwhile",
        source="ours: half the bytes",
        edit=_offloaded_narrow,
        needs=(OFFLOADS,),
        kinds=("grad",),
    ),
    Entry(
        name="host-buffer-overwritten",
        says="an activation's host memory is written before it comes back",
        source="ours: a host buffer that is reused too early, as pytorch #108811 has it on the device",
        edit=_host_overwritten,
        needs=(OFFLOADS,),
        kinds=("grad",),
    ),
)
