"""Measure the bytes of live tensors at each call.

Needs:    nothing.
Promises: an unchanged graph; the facts have the peak of live bytes, and the name of the call at the peak.
Refuses:  nothing.

1. Find the storage of each value: a view has the storage of its base; each result of a call has a storage of its own.
2. A storage lives from the call that makes it to the last call that reads its value, a view of the value, or a tuple
   that contains the value. After that call the generated code releases it.
3. Add up the live storages at each call. Parameters, buffers and inputs always exist and do not count; copies in host
   memory count separately.

Sizes that depend on data are estimated: see tensor_bytes.py. An operator's temporary memory and the allocator's
overhead do not count.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from bitproof.harness.graph.analysis.saved_activations import is_backward
from bitproof.harness.graph.analysis.tensor_bytes import MIB, TensorBytes
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.offload_operators import is_host_copy
from bitproof.harness.graph.tracing.trace import ChunkSymbol
from bitproof.harness.step.effects import shared_argument

# A storage is identified by the call that makes it, and the index of the call's result.
Storage = tuple[Node, int]


@dataclass(frozen=True)
class LiveMemory:
    """Bytes of live tensors in a step.

    - `peak`: the most bytes at any call, without copies in host memory.
    - `peak_node`: the name of that call.
    - `at_backward`: the bytes when backward starts.
    - `host_peak`: the most bytes in host memory.
    - `num_unsized`: the number of storages of unknown size, which are left out.
    """

    peak: int
    peak_node: str
    at_backward: int
    host_peak: int
    num_unsized: int


def measure_memory(module: GraphModule, context: PassContext) -> GraphModule:
    found = live_memory(module.graph, context.chunk_symbol)
    context.facts.update(
        peak_mib=round(found.peak / MIB, 3),
        peak_node=found.peak_node,
        at_backward_mib=round(found.at_backward / MIB, 3),
        host_peak_mib=round(found.host_peak / MIB, 3),
        num_unsized=found.num_unsized,
    )
    return module


def live_memory(graph: Graph, chunk_symbol: ChunkSymbol) -> LiveMemory:
    storages = _storages(graph)
    # In graph order, so that the last reader overwrites earlier ones.
    last_reader = {storage: node for node in graph.nodes for x in node.all_input_nodes for storage in storages[x]}
    tensor_bytes = TensorBytes(graph, chunk_symbol)
    live = peak = at_backward = host = host_peak = num_unsized = 0
    peak_node = ""
    size_of: dict[Storage, int] = {}
    dying: dict[Node, list[Storage]] = {}
    in_backward = False
    for node in graph.nodes:
        if is_backward(node) and not in_backward:
            in_backward, at_backward = True, live
        for storage in storages[node]:
            # A view, or an item of a tuple: another call made the storage.
            if storage[0] is not node:
                continue
            size = _bytes_of(storage, tensor_bytes)
            num_unsized += size is None
            size_of[storage] = size or 0
            # A result without readers dies at its own call.
            dying.setdefault(last_reader.get(storage, node), []).append(storage)
            if is_host_copy(node):
                host += size_of[storage]
            else:
                live += size_of[storage]
        # The peak is taken before releases: at a call, its inputs and its results are alive together.
        if live > peak:
            peak, peak_node = live, node.name
        host_peak = max(host_peak, host)
        for storage in dying.pop(node, ()):
            if is_host_copy(storage[0]):
                host -= size_of[storage]
            else:
                live -= size_of[storage]
    return LiveMemory(peak, peak_node, at_backward, host_peak, num_unsized)


def _storages(graph: Graph) -> dict[Node, list[Storage]]:
    """Return a dict: each node -> the storages that its value keeps alive.

    A storage is a pair (call that makes it, index of the call's result). Storages of graph inputs and attributes are
    left out.
    """
    found: dict[Node, list[Storage]] = {}
    for node in graph.nodes:
        shared = shared_argument(node)
        if node.op != "call_function":
            found[node] = []
        # An item of a tuple of new tensors keeps only its own storage alive, not those of the other items.
        elif node.target is operator.getitem and any(maker is node.args[0] for maker, _ in found[node.args[0]]):
            found[node] = [found[node.args[0]][node.args[1]]]
        elif shared is not None:
            found[node] = found[shared]
        else:
            found[node] = [(node, index) for index in range(len(_results(node)))]
    return found


def _results(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _bytes_of(storage: Storage, tensor_bytes: TensorBytes) -> int | None:
    value = _results(storage[0])[storage[1]]
    return tensor_bytes.of(value) if isinstance(value, torch.Tensor) else 0
