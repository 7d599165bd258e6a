"""Whether a graph module runs the calls that its graph lists, and nothing beside them."""

from __future__ import annotations

from torch.fx import GraphModule

from bitproof.harness.torch_compat import rewrites_code

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def runs_otherwise(module: GraphModule) -> str | None:
    """What makes a graph module run something else than its graph, in words; None for nothing.

    A user's pass may leave a hook on it, or on a graph nested in it, a function in place of its own, or a function that
    rewrites the code which is made of the graph.
    """
    if any(getattr(part, hooks) for part in module.modules() for hooks in _HOOKS):
        return "hooks"
    if any("forward" in vars(part) for part in module.modules()):
        return "a function in its place"
    graphs = (part.graph for part in module.modules() if isinstance(part, GraphModule))
    if any(map(rewrites_code, graphs)):
        return "code that is not made of it alone"
    return None
