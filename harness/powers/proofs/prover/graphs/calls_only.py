"""Checks that a graph module, when called, runs exactly the calls in its graph."""

from __future__ import annotations

import os

from torch import fx
from torch.fx import GraphModule
from torch.nn.modules import module as every_module

from bitproof.harness.torch_compat import LazyGraphModule, rewrites_code, wraps_its_call

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CALLS = ("forward", "_call_impl", "_wrapped_call_impl", "_compiled_call_impl", "_slow_forward", "_wrapped_call")
"""Attributes through which Python calls a module. A pass may replace them on a single module."""


def why_not_calls_only(module: GraphModule) -> str | None:
    """Return what makes a graph module run anything but its graph, such as "hooks"; None if it runs exactly its graph.

    A user's pass may add hooks, replace the function or class that runs the graph, or rewrite its code.
    """
    if any(getattr(part, hooks) for part in module.modules() for hooks in _HOOKS):
        return "hooks"
    if any(getattr(every_module, f"_global{hooks}") for hooks in _HOOKS):
        return "hooks on all modules"
    # Set on the instance, such a function takes effect without any change of the class.
    if any(vars(part).get(name) is not None for part in module.modules() for name in _CALLS):
        return "a function in its place"
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    if any(type(part).__mro__[1] not in (GraphModule, LazyGraphModule) for part in parts):
        return "a class of its own"  # torch creates a subclass for each graph module
    if any(_is_called_otherwise(type(part)) for part in parts):
        return "a function in its place"
    if any(wraps_its_call(part) for part in parts):
        return "a function in its place"
    if any(rewrites_code(part.graph) for part in parts):
        return "code that is not made of it alone"
    return None


def _is_called_otherwise(kind: type) -> bool:
    names = {*_CALLS, "__call__"} - {"_wrapped_call"}  # torch's is an object, see `wraps_its_call`
    return any(not _is_torchs(value) for name, value in vars(kind).items() if name in names)


def _is_torchs(function: object) -> bool:
    # torch compiles the code that it generates for a graph under a file name such as `<eval_with_key>.5`.
    code = getattr(function, "__code__", None)
    file = str(getattr(code, "co_filename", ""))
    return file.startswith(("<eval_with_key>", os.path.dirname(fx.__file__) + os.sep))
