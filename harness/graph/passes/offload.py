"""Keep activations in host memory between forward and backward.

Needs:    activations have tags (tag_memory); none tagged `offload` shares its storage with a saved activation.
Promises: same bits and strides; backward reads the copy that came back, and the activation itself is freed in forward.
Refuses:  a depth that the graph's blocks do not have: of 4 blocks, none is 4 blocks before or after another.

For each activation tagged `offload`:

1. Start the copy to host memory after the activation's last use in forward. Wait for the copy after `memory.defer`
   whole blocks. For example, with 1, a copy from layers.2 overlaps with layers.3, and ends before layers.4. If fewer
   blocks are left, the copy has time until backward starts.
2. Start the copy back `memory.prefetch` blocks ahead. For example, with 1, if backward of layers.2 needs it, start it
   before backward of layers.3. If backward has fewer blocks before that, start with the first of them.
3. Wait for the copy back just before backward first needs the activation, also for a recomputation. Let backward read
   this copy.

The copies belong to the activation's module, so they run once per chunk if the module does.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph import offload_operators
from bitproof.harness.graph.analysis.halves import HALF_KEY, set_half
from bitproof.harness.graph.analysis.saved_activations import (
    STANDS_FOR_KEY,
    block_starts,
    first_needs,
    is_backward,
    is_recomputed,
    tag_of,
)
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.origin import META_KEY, origin_of
from bitproof.harness.step.storages import Storages


def offload(module: GraphModule, context: PassContext, *, blocks: str) -> GraphModule:
    """Keep activations in host memory between forward and backward.

    `blocks` is a pattern of modules, such as layers.*.
    """
    graph = module.graph
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    needs = first_needs(graph, is_recomputed)
    last_uses = _last_uses(nodes)
    forward_starts = block_starts(graph, blocks, lambda node: not is_backward(node))
    backward_starts = block_starts(graph, blocks, is_backward)
    first_backward = next((node for node in nodes if is_backward(node)), graph.output_node())
    moved = [node for node in nodes if node in needs and tag_of(node) == "offload"]
    defer, prefetch = context.memory.defer, context.memory.prefetch
    if moved:
        _refuse_too_deep("defer", defer, forward_starts)
        _refuse_too_deep("prefetch", prefetch, backward_starts)
    depths: dict[str, Counter[int]] = {"deferred": Counter(), "prefetched": Counter()}
    hosts: dict[Node, Node] = {}
    for node in moved:
        last_use = last_uses[node]
        block = bisect.bisect_right(forward_starts, place[last_use], key=place.__getitem__)
        # `forward_starts[block]` starts the next block.
        depth = min(defer, len(forward_starts) - block)
        depths["deferred"][depth] += 1
        end_of_copy = (*forward_starts, first_backward)[block + depth]
        host = _call(node, offload_operators.OFFLOAD, (node,), "offload", before=last_use.next)
        hosts[node] = _call(node, offload_operators.WAIT_OFFLOAD, (host, node), "host", before=end_of_copy)
    # A second loop, so that each copy back is written after all waits: both may be inserted before the same call, such
    # as the first of backward.
    for node, host in hosts.items():
        readers = [user for user in node.users if is_backward(user)]
        need = needs[node]
        block = bisect.bisect_right(backward_starts, place[need], key=place.__getitem__) - 1
        depth = min(prefetch, max(block, 0))
        depths["prefetched"][depth] += 1
        start_prefetch = backward_starts[block - depth] if block >= 0 else need
        device = node.meta["val"].device.type
        reload = _call(node, offload_operators.RELOAD, (host, device), "reload", before=start_prefetch)
        copy = _call(node, offload_operators.WAIT_RELOAD, (reload,), "reloaded", before=need)
        for call in (reload, copy):
            set_half(call, "backward")
        # Rematerialization reads this, so that repeated calls use the copy as well.
        copy.meta[STANDS_FOR_KEY] = node.name
        for reader in readers:
            reader.replace_input_with(node, copy)
    context.facts["offloaded_nodes"] = len(moved)
    # For example, {"1": 4, "2": 9}: 9 copies have two whole blocks' time, and 4 only one.
    for name, counts in depths.items():
        context.facts[name] = {str(depth): counts[depth] for depth in sorted(counts)}
    module.recompile()
    return module


def _refuse_too_deep(name: str, depth: int, starts: list[Node]) -> None:
    """Raise PassError if no block has `depth` blocks before or after it.

    A depth of 1, the default, is always accepted.
    """
    most = max(len(starts) - 1, 1)
    if depth > most:
        raise PassError(
            f"memory.{name} is deeper than the graph",
            expected=f"at most {most}, as the graph has {len(starts)} blocks in "
            + ("forward" if name == "defer" else "backward"),
            found=f"{name}={depth}",
            fix="choose fewer blocks, or a model with more layers",
        )


def _last_uses(nodes: list[Node]) -> dict[Node, Node]:
    """Return a dict: each value of forward -> the last forward call that uses its storage.

    If no other call uses the storage, this is the call that computes the value.
    """
    storages = Storages(nodes)
    last: dict[Node, Node] = {}
    for node in nodes:
        if node.op == "call_function" and not is_backward(node):
            last |= dict.fromkeys(storages.of((node, *node.all_input_nodes)), node)
    return {node: last[owner] for node, owner in storages.owners.items() if owner in last}


def _call(activation: Node, target: Callable[..., Any], args: tuple[Any, ...], suffix: str, *, before: Node) -> Node:
    graph = activation.graph
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, name=f"{activation.name}_{suffix}")
    values = [x.meta["val"] if isinstance(x, Node) else x for x in args]
    with torch.no_grad(), values[0].fake_mode:
        node.meta = {"val": target(*values), META_KEY: origin_of(activation)}
    if HALF_KEY in activation.meta:
        node.meta[HALF_KEY] = activation.meta[HALF_KEY]
    return node
