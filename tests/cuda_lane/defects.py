"""A defect that only the CUDA form of a step has: passes for `--extra-pass`."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


def forget_causality(module: GraphModule, context: Any) -> GraphModule:
    """Let CUDA's flash attention see later positions; the CPU's operator of another name is left as it is."""
    for node in module.graph.find_nodes(op="call_function", target=FLASH):
        node.args = (*node.args[:4], False, *node.args[5:])
    module.recompile()
    return module
