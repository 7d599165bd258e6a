"""Partition the step into a forward and a backward graph by a minimum cut over the saved values.

Needs:    a graph without chunks and without in-place writes, except to buffers at its end; a call
          that makes backward's initial gradient (export_joint.py marks this call).
Promises: same bits: every call computes the same value, and some calls run twice. All of forward precedes all of
          backward, and each call states its half (halves.py).
Refuses:  a graph with other in-place writes, or without a call that makes backward's initial gradient.

1. Convert the graph to the form that torch's partitioners read. Backward's initial gradient is a separate input, and a
   buffer's new value is an output of forward.
2. Let torch partition it. The saved values are a minimum cut of the graph, weighted by their bytes. Cheap values are
   recomputed, collectives never.
3. Write both graphs into a single graph, forward first. A buffer is written after the last call of forward that
   reads its old value, or at the end of the graph if backward reads it.

Byte counts include each whole storage once. They leave out graph inputs, as these stay alive anyway.
"""

# `joint` is the step as one graph, `forward` and `backward` are torch's results

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.halves import HALF_KEY
from bitproof.harness.graph.analysis.tensor_bytes import TensorBytes
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.origin import META_KEY, RECOMPUTED_KEY, UNKNOWN, origin_of
from bitproof.harness.graph.symbols import SYMBOLIC_SCALARS
from bitproof.harness.graph.tracing.export_joint import SEED_KEY, write_back
from bitproof.harness.step.effects import shared_argument
from bitproof.harness.step.storages import Storages
from bitproof.harness.torch_compat import divided, rename

aten = torch.ops.aten

_TAG = "partitioner_tag"
"""The metadata from which torch's partitioners read a node's side."""


class _Write(NamedTuple):
    """A write at the end of the graph: the input `buffer` gets the new `value`."""

    buffer: Node
    value: Node


def partition(module: GraphModule, context: PassContext, *, by: str) -> GraphModule:
    """Partition the step into a forward and a backward graph: see the top of this file.

    `by` names torch's partitioner: "min_cut", or "default", which saves every value of forward that backward reads.
    """
    graph = module.graph
    writes = _final_writes(graph)
    seed = _seed_of(graph)
    sizes = TensorBytes(graph, context.chunk_symbol)
    # Counted before the cut: the values that backward reads without any recomputation.
    uncut = _crossing(graph)
    joint = _joint_form(module, writes, seed)
    num_joint = len(joint.graph.nodes)
    # All inputs but the tangent stay alive in any case, so saving them costs nothing.
    num_state = len(graph.find_nodes(op="placeholder"))
    # torch's common-subexpression elimination would merge two `randn_like`: it knows only some random draws.
    draws = any(operators.is_random(node) for node in joint.graph.nodes)
    # It would also merge calls of two modules, such as `arange`, though each module has chunks of its own.
    cse = not draws and context.chunking is None
    forward, backward = divided(joint, 1 + len(writes), num_state, by=by, cse=cse)
    written, saved, recomputed = _join_halves(module, forward, backward, writes, seed)
    context.facts.update(
        by=by,
        nodes_joint=num_joint,
        nodes_forward=len(forward.graph.nodes),
        nodes_backward=len(backward.graph.nodes),
        saved=_num_tensors(saved),
        saved_bytes=bytes_kept(saved, sizes),
        uncut=_num_tensors(uncut),
        uncut_bytes=bytes_kept(uncut, sizes),
        recomputed=recomputed,
    )
    return written


def bytes_kept(values: Iterable[Node], sizes: TensorBytes) -> int:
    """Return the number of bytes in the storages that `values` keep alive.

    Graph inputs are left out. Unknown sizes count as 0.
    """
    # Each storage once, even if several of the values are views of it.
    owners = dict.fromkeys(map(_owner, values))
    tensors = [x.meta["val"] for x in owners if x.op == "call_function" and isinstance(x.meta["val"], torch.Tensor)]
    return sum(sizes.of(tensor) or 0 for tensor in tensors)


def _owner(node: Node) -> Node:
    """Return the node that makes the storage of a node's value.

    For an item of a tuple, this is the item's own node, since each result of a call has a storage of its own.
    """
    while node.target is not operator.getitem and (shared := shared_argument(node)) is not None:
        node = shared
    return node


def _num_tensors(values: Iterable[Node]) -> int:
    return sum(not isinstance(value.meta.get("val"), SYMBOLIC_SCALARS) for value in values)


def _crossing(graph: Graph) -> list[Node]:
    """Return the calls of forward whose results the backward pass reads. The graph is not partitioned yet."""
    reads = {x for node in graph.nodes if _is_backward(node) for x in node.all_input_nodes}
    return [node for node in graph.nodes if node in reads and node.op == "call_function" and not _is_backward(node)]


def _is_backward(node: Node) -> bool:
    return node.op == "call_function" and origin_of(node).direction == "backward"


# -- to torch's form --------------------------------------------------------------------------------


def _final_writes(graph: Graph) -> list[_Write]:
    """Return the writes to graph inputs at the end of the graph. Raises PassError for any other in-place write."""
    found = []
    for node in graph.nodes:
        if not operators.written_arguments(node):
            continue
        target, *values = node.all_input_nodes
        # `copy_` returns its target, so a reader of the call would need the write where it is.
        if node.target is not aten.copy_.default or target.op != "placeholder" or node.users or len(values) != 1:
            raise PassError(
                f"a graph that writes in place cannot be partitioned: `{node.name}` does",
                expected="values, and copies of them into buffers that are not read afterwards",
                found=f"{node.target} of {', '.join(x.name for x in node.all_input_nodes)}",
            )
        found.append(_Write(target, values[0]))
    return found


def _seed_of(graph: Graph) -> Node:
    seeds = [node for node in graph.nodes if node.meta.get(SEED_KEY)]
    if len(seeds) != 1:
        raise PassError(
            "a graph without a start of backward cannot be partitioned",
            expected="one call that makes backward's initial gradient, as in an exported step",
            found=f"{len(seeds)} of them",
        )
    return seeds[0]


def _joint_form(module: GraphModule, writes: list[_Write], seed: Node) -> GraphModule:
    """Return a copy of the graph in the form that torch's partitioners read.

    `seed`, the call that makes backward's initial gradient, becomes an input. The outputs are the loss, the new values
    of buffers, then the gradients.
    """
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    # Torch's partitioners recognize an input of backward by the name.
    env[seed] = graph.placeholder("tangents_1")
    env[seed].meta = {"val": seed.meta["val"]}
    follows_seed = False
    # A call of a user's pass has no origin: it belongs to the half in which the pass put it.
    for node in module.graph.nodes:
        follows_seed |= node is seed
        # The writes at the end are left out: their values become outputs, and `_join_halves` writes the buffers again.
        if node.op in ("placeholder", "output") or node in env or operators.written_arguments(node):
            continue
        env[node] = graph.node_copy(node, env.__getitem__)
        is_backward = follows_seed if origin_of(node) == UNKNOWN else _is_backward(node)
        env[node].meta[_TAG] = "is_backward" if is_backward else "is_forward"
    outputs: Any = module.graph.output_node().args[0]
    loss, *gradients = outputs
    graph.output(tuple(env[x] for x in (loss, *(write.value for write in writes), *gradients)))
    return GraphModule(module, graph)


# -- and back ---------------------------------------------------------------------------------------


def _join_halves(
    module: GraphModule, forward: GraphModule, backward: GraphModule, writes: list[_Write], seed: Node
) -> tuple[GraphModule, list[Node], int]:
    """Join forward and backward in a single graph.

    `writes` are the writes to buffers, and `seed` is the call that makes backward's initial gradient. Returns (the
    graph, the values of forward that the backward pass reads, the number of calls that run twice).
    """
    graph = Graph()
    values: dict[str, Node] = {}
    inputs: dict[Node, Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        inputs[node] = values[node.name] = graph.placeholder(node.name)
        values[node.name].meta = dict(node.meta)
    _copy(graph, forward, values, "forward")
    outputs: Any = forward.graph.output_node().args[0]
    # Forward's outputs: the loss, new values of buffers, then the saved values.
    loss, *of_buffers = (values[x.name] for x in outputs[: 1 + len(writes)])
    names = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    # Backward's inputs have the names of forward's values, apart from the tangent.
    crossing = [node.name for node in backward.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    due = list(zip((inputs[write.buffer] for write in writes), of_buffers, strict=True))
    # Backward reads the old value of these buffers, so they may only be written at the end.
    read_late = {values[name] for name in crossing}
    # In order, so a later reader, itself or by a view, replaces an earlier one.
    owners = Storages(graph.nodes).owners
    last_readers = {owners[x]: node for node in graph.nodes for x in node.all_input_nodes}
    *_, last_input = inputs.values()
    for buffer, value in due:
        if buffer not in read_late:
            # Written once nothing reads the old value any more, so that the next chunk reads what this one wrote.
            with graph.inserting_after(max(last_input, value, last_readers.get(buffer, value))):
                write_back(graph, buffer, value).meta[HALF_KEY] = "forward"
    available = {name: values[name] for name in crossing}
    # torch's partitioners read the start of backward as an input. Here backward begins with the call that computes it.
    start = graph.call_function(seed.target, (loss, *seed.args[1:]), dict(seed.kwargs))  # type: ignore[arg-type]
    start.meta = dict(seed.meta) | {HALF_KEY: "backward"}
    available["tangents_1"] = start
    recomputed = _copy(graph, backward, available, "backward", names)
    for buffer, value in due:
        if buffer in read_late:
            write_back(graph, buffer, value).meta[HALF_KEY] = "backward"
    gradients: Any = backward.graph.output_node().args[0]
    graph.output([loss, *(available[x.name] for x in gradients)])
    saved = [values[name] for name in crossing if values[name].op == "call_function"]
    return GraphModule(module, graph), saved, recomputed


def _copy(graph: Graph, half: GraphModule, values: dict[str, Node], name: str, known: Iterable[str] = ()) -> int:
    """Append copies of the calls of `half` to the graph, and return the number of calls that run a second time.

    - `values`: maps names to nodes of the graph. The copies are added to it.
    - `name`: the half's name, forward or backward.
    - `known`: the names of the calls that the graph already has from the other half. A call of `half` with such a name
      runs a second time.
    """
    recomputed = 0
    for node in half.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        copy = graph.node_copy(node, lambda x: values[x.name])
        # Both keys are marks for torch's partitioner or by it.
        copy.meta = {key: value for key, value in node.meta.items() if key not in (_TAG, "recompute")}
        if node.op == "call_function":
            copy.meta[HALF_KEY] = name
            copy.meta.setdefault(META_KEY, origin_of(node))
            if node.name in known:
                rename(copy, f"{node.name}_recomputed")
                copy.meta[RECOMPUTED_KEY] = True
                recomputed += 1
        values[node.name] = copy
    return recomputed
