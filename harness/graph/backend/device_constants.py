"""Removes the rank's device index from constants of a finished graph.

For example, `x.new_zeros(..., device=x.device)` writes `cuda:3` into the graph of rank 3. Without the index, all ranks
have the same graph, and each process uses its current device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate


def forget_device_index(module: GraphModule, device: torch.device) -> int:
    """Replace `device`, such as `cuda:3`, by its type, `cuda`, in a graph and its nested graphs.

    Return the number of replacements. Other devices stay unchanged.
    """
    if device.index is None:
        return 0
    found, anywhere = 0, torch.device(device.type)

    def forget(argument: Any) -> Any:
        nonlocal found
        if argument != device or not isinstance(argument, torch.device):
            return argument
        found += 1
        return anywhere

    # Nested graphs, such as those of FlexAttention, have constants, too.
    for nested in module.modules():
        if isinstance(nested, GraphModule):
            before = found
            for node in nested.graph.nodes:
                node.args, node.kwargs = map_aggregate(node.args, forget), map_aggregate(node.kwargs, forget)
            if found != before:
                nested.recompile()
    return found
