"""Two user passes in plain FX: `wait_late` keeps every bit, `add_gradients_in_bfloat16` silently changes some.

    bitproof run -k moe_batch --extra-pass cases/examples/extra_passes.py:wait_late
    bitproof run -k moe_batch --extra-pass cases/examples/extra_passes.py:add_gradients_in_bfloat16

The first run is EQUAL, the second DIFFERENT. A pass changes a GraphModule in place or returns a new GraphModule. It
need not import bitproof, and new nodes need no metadata.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def wait_late(module: GraphModule) -> None:
    """Move each wait for a collective directly before the first reader of its result.

    Other nodes then run while the collective is in flight.
    """
    # Only the order changes, so every bit stays.
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    for wait in module.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default):
        if wait.users:
            min(wait.users, key=place.__getitem__).prepend(wait)


def add_gradients_in_bfloat16(module: GraphModule) -> None:
    """Add the gradients of two chunks in bfloat16, which halves the bytes.

    This changes bits: the gradients are sums in float32, which have more digits than bfloat16. For example, 1 + 2**-9
    becomes 1.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        # bitproof's chunk pass notes a node's chunk in its metadata.
        if [getattr(x, "meta", {}).get("chunk") for x in node.args] == [0, 1]:
            with module.graph.inserting_before(node):
                halves = [_cast(module, x, torch.bfloat16) for x in node.args]
                total = module.graph.call_function(aten.add.Tensor, tuple(halves))
                node.replace_all_uses_with(_cast(module, total, torch.float32))
            module.graph.erase_node(node)


def _cast(module: GraphModule, x: Any, dtype: torch.dtype) -> Node:
    return module.graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
