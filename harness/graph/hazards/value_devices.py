"""Finds the devices of a graph's values, and the copies that block the host."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from bitproof.harness.graph.operators import arguments_of
from bitproof.harness.torch_operators import schema_of

ON_CUDA, ON_HOST, ELSEWHERE = 1, 2, 4
"""The bits of a mask of devices. ELSEWHERE stands for other devices, numbers and unknown values."""


def places_of(value: Any) -> int:
    """Return the devices of a value as a bit mask. For a tuple or list, it has the bits of all items."""
    if isinstance(value, Tensor):
        return {"cuda": ON_CUDA, "cpu": ON_HOST}.get(value.device.type, ELSEWHERE)
    if isinstance(value, (tuple, list)) and value:
        return functools.reduce(int.__or__, map(places_of, value))
    return ELSEWHERE


def is_for_cuda(module: GraphModule) -> bool:
    """Return whether a graph, or a graph nested in it, has inputs on a GPU."""
    graphs = [each.graph for each in module.modules() if isinstance(each, GraphModule)]
    return any(device_of(x.meta.get("val")) == "cuda" for graph in graphs for x in graph.find_nodes(op="placeholder"))


@functools.cache
def _may_hold_up_host(target: Any) -> bool:
    # `non_blocking` is an argument of operators that can copy between devices.
    schema = schema_of(target)
    return schema is not None and any(argument.name == "non_blocking" for argument in schema.arguments)


def holds_up_host(node: Node) -> bool:
    """Return whether a call copies between host and GPU and blocks the host until the copy is done."""
    if not _may_hold_up_host(node.target):
        return False
    devices = {device_of(x.meta.get("val")) for x in (node, *node.all_input_nodes)}
    return {"cpu", "cuda"} <= devices and not arguments_of(node).get("non_blocking")


def device_of(value: Any) -> str | None:
    """Return the device type of a tensor, such as "cuda", or of the first item of a tuple or list.

    None for any other value.
    """
    if isinstance(value, Tensor):
        return value.device.type
    return next((device_of(x) for x in value), None) if isinstance(value, (tuple, list)) else None
