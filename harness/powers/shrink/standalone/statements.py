"""Writes a graph as Python, with a line for each call: `add_3 = torch.ops.aten.add.Tensor(mm_1, x)`."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from bitproof.harness.graph.operators import is_collective
from bitproof.harness.powers.shrink.standalone.reading import NoFileError, place_of
from bitproof.harness.torch_compat import OpOverload

NAMESPACES = {"aten", "prims", "_c10d_functional"}


def function_text(
    side: str, calls: Sequence[Node], names: Mapping[Node, str], outputs: Mapping[str, Node], probing: bool
) -> str:
    """Return the source code of a graph's function: a line for each call, and a comment when the module changes."""
    lines, place = [f"def {side}(INPUTS):"], ""
    for node in calls:
        if place_of(node) != place:
            place = place_of(node)
            lines.append(f"    # {place}")
        lines.append(f"    {names[node]} = {_call(node, names)}")
        # A collective has no value before its wait.
        if probing and not is_collective(node):
            lines.append(f"    see({node.name!r}, {names[node]})")
    returned = ", ".join(f"{name!r}: {names[node]}" for name, node in outputs.items())
    return "\n".join([*lines, f"    return {{{returned}}}"])


def _call(node: Node, names: Mapping[Node, str]) -> str:
    if node.target is operator.getitem:
        return f"{_text(node.args[0], names)}[{_text(node.args[1], names)}]"
    arguments = [_text(argument, names) for argument in node.args]
    arguments += [f"{name}={_text(argument, names)}" for name, argument in node.kwargs.items()]
    return f"{_function_name(node)}({', '.join(arguments)})"


def _function_name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload) and target.namespace in NAMESPACES:
        return f"torch.ops.{target}"
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", str(target))
    # Python's own functions on sizes, such as `operator.add`.
    if node.op == "call_function" and module in ("_operator", "math"):
        return f"{module.removeprefix('_')}.{name}"
    if node.op == "call_function" and module == "torch" and getattr(torch, name, None) is target:
        return f"torch.{name}"
    name = str(target) if isinstance(target, OpOverload) else name
    raise NoFileError(f"a graph has `{node.name}`, a {node.op} of {name}, which plain torch does not have")


def _text(value: Any, names: Mapping[Node, str]) -> str:
    match value:
        case Node():
            return names[value]
        case list():
            return f"[{', '.join(_text(item, names) for item in value)}]"
        case tuple():
            # A comma after each item, as a tuple of one item needs it.
            return f"({''.join(_text(item, names) + ', ' for item in value)})"
        case torch.device():
            return f"torch.device({str(value)!r})"
        # `inf` and `nan` are no literals of Python.
        case float() if not math.isfinite(value):
            return f"float({str(value)!r})"
        case slice():
            return f"slice({', '.join(_text(item, names) for item in (value.start, value.stop, value.step))})"
        case None | bool() | int() | float() | str() | torch.dtype() | torch.layout() | torch.memory_format():
            return repr(value)
    raise NoFileError(f"a graph has an argument of type {type(value).__name__}, which cannot be written down")
