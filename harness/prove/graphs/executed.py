"""Whether a graph module runs the calls that its graph lists, and nothing beside them."""

from __future__ import annotations

from torch.fx import GraphModule
from torch.nn.modules import module as every_module

from bitproof.harness.torch_compat import LazyGraphModule, rewrites_code, wraps_its_call

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CALLS = ("forward", "_call_impl", "_wrapped_call_impl", "_compiled_call_impl", "_slow_forward", "_wrapped_call")
"""What Python runs where a module is called, as far as a pass may put something else in its place on the module."""


def runs_otherwise(module: GraphModule) -> str | None:
    """What makes a graph module run something else than its graph, in words; None for nothing.

    A user's pass may leave a hook on it, on a graph nested in it or on all modules, a function or a class of its own in
    place of what runs the graph, or a function that rewrites the code which is made of the graph.
    """
    if any(getattr(part, hooks) for part in module.modules() for hooks in _HOOKS):
        return "hooks"
    if any(getattr(every_module, f"_global{hooks}") for hooks in _HOOKS):
        return "hooks on all modules"
    if any(vars(part).get(name) is not None for part in module.modules() for name in _CALLS):
        return "a function in its place"
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    if any(type(part).__mro__[1] not in (GraphModule, LazyGraphModule) for part in parts):
        return "a class of its own"  # each graph module has a class, which torch makes below one of these
    if any(wraps_its_call(part) for part in parts):
        return "a function in its place"
    if any(rewrites_code(part.graph) for part in parts):
        return "code that is not made of it alone"
    return None
