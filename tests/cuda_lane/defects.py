"""A defect that only the CUDA form of a step has: passes for `--extra-pass`."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from bitproof.harness.errors import TraceError

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


def forget_causality(module: GraphModule, context: Any) -> GraphModule:
    """Let CUDA's flash attention see later positions; the CPU's operator of another name is left as it is."""
    for node in module.graph.find_nodes(op="call_function", target=FLASH):
        node.args = (*node.args[:4], False, *node.args[5:])
    module.recompile()
    return module


def fail(*args: Any, **kwargs: Any) -> Any:
    """Trace nothing."""
    raise TraceError("it cannot be traced")


def forget_the_wait_for_a_reload(module: Any) -> None:
    """Let backward read an activation while it is copied back."""
    wait = next(node for node in module.graph.nodes if str(node.target) == "bitproof.wait_reload.default")
    wait.replace_all_uses_with(wait.args[0])
    module.graph.erase_node(wait)


def fetch_numbers_one_by_one(module: Any) -> None:
    """Let the host wait for a number of its own for each that it reads."""
    [*copies] = (
        n for n in module.graph.nodes if str(n.target) == "aten._to_copy.default" and not n.meta["val"].is_cuda
    )
    with module.graph.inserting_after(copies[0]):
        for _ in range(4):
            module.graph.call_function(copies[0].target, copies[0].args, copies[0].kwargs).meta |= copies[0].meta
