"""Records activations: the outputs of observed modules, and the gradients of these outputs.

Needs:    a trace with a node for every marked tensor; passes that copy a node's metadata to the nodes they write.
Promises: the graph's calls stay unchanged and in order; the added calls only read.
Refuses:  an activation whose chunks would have to be joined or split along a dim that it does not have.

1. During the trace, hooks mark the nodes that compute activations. A mark is metadata, and no pass depends on it.
2. After all passes, a call of `observed` is added for each mark, after the marked node or the nodes of its chunks.
3. If only eager has a value per chunk, the graph's value is split. If only the graph has values per chunk, they are
   joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.case import Boundary, Chunking, Kind, observed_modules
from bitproof.harness.errors import PassError, TraceError
from bitproof.harness.graph import symbols
from bitproof.harness.graph.origin import META_KEY, RECOMPUTED_KEY, UNKNOWN
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.torch_compat import disable_current_modes, traced_node, tree_leaves

Observe = Callable[[Kind, str, Tensor], None]

MARKS_KEY = "observed"
"""The metadata key of a node's marks."""


class Mark(NamedTuple):
    """A mark on a node that computes an output of a module, or the gradient of such an output.

    - `boundary`: the name of the output or gradient.
    - `dim`: the value's chunked dim; None if no single dim is chunked.
    - `carries`: True if the value's shape depends on the size of the chunked dim.
    """

    boundary: Boundary
    dim: int | None
    carries: bool


_observers: list[Observe] = []


def observed(name: str, parts: list[Tensor], dim: int | None = None, piece: int | None = None) -> None:
    """Pass an activation to the step's observer, if there is one. Graphs call this function.

    `name` is the record's name. The other arguments are those of `activation`.
    """
    if _observers:
        _observers[-1]("activation", name, activation(parts, dim, piece))


def activation(parts: list[Tensor], dim: int | None = None, piece: int | None = None) -> Tensor:
    """Return an activation, joined along `dim` from its chunks `parts`.

    With `piece`, return only the first half (0) or second half (1) along `dim`.
    """
    # These calls are not part of the step's log.
    with disable_current_modes(), torch.no_grad():
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim if dim is not None else 0)
        if piece is None or dim is None:
            return whole.detach()
        half = whole.shape[dim] // 2
        return whole.detach().narrow(dim, piece * half, half)


@contextmanager
def observed_by(observe: Observe) -> Iterator[None]:
    """Return a context in which `observe` is called with each activation of a graph that runs."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.pop()


# 1. Marks.


@contextmanager
def marking(model: nn.Module, patterns: Sequence[str], tracer: Any, symbol: Any) -> Iterator[None]:
    """Return a context for a trace, which marks the nodes that compute activations of observed modules.

    - `patterns`: choose the observed modules.
    - `tracer`: makes the nodes.
    - `symbol`: the size of the chunked dim.
    """
    names = observed_modules(patterns, [name for name, _ in model.named_modules()]) if patterns else []
    calls: Counter[str] = Counter()

    def mark(tensor: Tensor, boundary: Boundary) -> None:
        node = traced_node(tensor, tracer)
        if node is None:
            raise TraceError(
                f"cannot observe {boundary.name}: the trace has no node for it",
                expected="a tensor that an operator computes in the step",
                found=f"{tensor.dtype} of shape {list(map(str, tensor.shape))}",
                fix="leave its module out of --observe",
            )
        made = Mark(boundary, symbols.chunk_dim(tensor, symbol), symbols.carries(tensor, symbol))
        node.meta[MARKS_KEY] = (*node.meta.get(MARKS_KEY, ()), made)

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            earlier = calls[name]
            calls[name] += 1
            for index, tensor in enumerate(tree_leaves(output)):
                if isinstance(tensor, Tensor):
                    place = None if tensor is output else index
                    mark(tensor, Boundary(name, "forward", place, earlier))
                    # A gradient hook runs while backward is traced, so its node exists by then.
                    if tensor.requires_grad:
                        backward = Boundary(name, "backward", place, earlier)
                        tensor.register_hook(lambda gradient, backward=backward: mark(gradient, backward))

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(hook_of(name)) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def copy_marks(node: Node, to: Node) -> None:
    if MARKS_KEY in node.meta:
        to.meta[MARKS_KEY] = (*to.meta.get(MARKS_KEY, ()), *node.meta[MARKS_KEY])


class Marked(NamedTuple):
    """A marked node and its readers.

    `readers` maps the name of each reader to the positions of the marked node among the nodes that it reads. For
    example, {"add_4": [0, 1]} if `add_4` adds the marked node to itself.
    """

    node: Node
    readers: dict[str, list[int]]


def marked_nodes(graph: Graph) -> list[Marked]:
    """Return all marked nodes of a graph. Call it before a user's pass changes the graph."""
    found = []
    for node in graph.nodes:
        if MARKS_KEY in node.meta:
            # By name, since the user's code may replace nodes.
            readers = {user.name: [i for i, x in enumerate(_nodes_read(user)) if x is node] for user in node.users}
            found.append(Marked(node, readers))
    return found


def hand_on_lost_marks(graph: Graph, before: Sequence[Marked]) -> None:
    """Copy marks of nodes that a user's pass removed to the nodes that replace them.

    `before` is the result of `marked_nodes` before the pass. For example, `add_4` reads the marked node `mm_3`, and the
    pass replaces `mm_3` by `mm_9`. Then `mm_9` gets the marks of `mm_3`. If `mm_9` has no origin, it also gets the
    chunk of `mm_3`.
    """
    nodes = {node.name: node for node in graph.nodes}
    for node, readers in before:
        if nodes.get(node.name) is not None:
            continue
        for name, places in readers.items():
            read = _nodes_read(nodes[name]) if name in nodes else []
            # A reader that reads fewer nodes than before was changed as well, and shows nothing.
            if places and places[-1] < len(read):
                to = read[places[0]]
                copy_marks(node, to)
                if META_KEY not in to.meta and CHUNK_KEY in node.meta:
                    to.meta[CHUNK_KEY] = node.meta[CHUNK_KEY]
                break


def _nodes_read(node: Node) -> list[Node]:
    # Unlike `all_input_nodes`, in the order of the arguments, and with repetitions.
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


# 2. Calls that observe.


def observe_activations(module: GraphModule, chunking: Chunking | None) -> int:
    """Add calls of `observed` to a graph for all marks, and return the number of these calls.

    `chunking` is None for a graph without chunks. Raises PassError if chunks cannot be joined or split.
    """
    # A mark may be on several nodes, for example one in each chunk. Recomputed nodes repeat a value that forward has
    # already shown.
    found: dict[Mark, dict[int | None, Node]] = {}
    for node in module.graph.nodes:
        if not node.meta.get(RECOMPUTED_KEY):
            for mark in node.meta.get(MARKS_KEY, ()):
                found.setdefault(mark, {}).setdefault(node.meta.get(CHUNK_KEY), node)
    shown = [show for mark, nodes in found.items() for show in _shows(mark, nodes, chunking)]
    insert_observers(module.graph, shown)
    module.recompile()
    return len(shown)


# The arguments of a call of `observed`: the record's name, the nodes to join, the dim, and the half to take.
Show = tuple[str, list[Node], int | None, int | None]


def insert_observers(graph: Graph, shows: Sequence[Show]) -> None:
    """Add calls of `observed` to a graph, each after the last node that it reads.

    `shows` has the arguments of each call.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    first = next((node for node in order if node.op not in ("placeholder", "get_attr")), None)
    for name, parts, dim, piece in shows:
        last = max(parts, key=order.__getitem__)
        # Graph inputs stay together at the beginning, so a call that reads only inputs goes after all of them.
        after_inputs = first is not None and order[last] < order[first]
        with graph.inserting_before(first) if after_inputs else graph.inserting_after(last):
            call = graph.call_function(observed, (name, parts, dim, piece))
        call.meta[META_KEY] = UNKNOWN


def remove_observers(graph: Graph) -> list[Show]:
    """Remove the calls of `observed` from a graph, so that other code may change the rest of the graph.

    Return the arguments of each call, for `insert_observers`.
    """
    shows: list[Show] = []
    for node in graph.find_nodes(op="call_function", target=observed):
        name, parts, dim, piece = node.args
        shows.append((name, list(parts), dim, piece))
        graph.erase_node(node)
    return shows


def _shows(mark: Mark, nodes: dict[int | None, Node], chunking: Chunking | None) -> Iterator[Show]:
    """Yield the arguments of each call of `observed` that is needed for `mark`.

    `nodes` maps the number of a chunk to the marked node in that chunk, and None to the marked node outside all chunks.
    """
    boundary, dim = mark.boundary, mark.dim
    root = chunking.root_of(boundary.module) if chunking else None
    whole = nodes.get(None)
    # Eager records the boundary of a chosen module itself whole, and that of a module within it once per chunk.
    if root is None or root == boundary.module:
        if whole is not None:
            yield boundary.name, [whole], None, None
        elif not mark.carries:
            # Without the chunked dim nothing can be joined: the last chunk's value counts.
            yield boundary.name, [nodes[max(nodes, key=str)]], None, None
        elif dim is None:
            raise _refusal(boundary, "joined")
        elif 0 in nodes and 1 in nodes:
            yield boundary.name, [nodes[0], nodes[1]], dim, None
        return
    # Within a chunked module, eager has a value for each chunk.
    for chunk in (0, 1):
        name = boundary._replace(chunk=chunk).name
        if chunk in nodes:
            yield name, [nodes[chunk]], None, None
        elif whole is not None and not mark.carries:
            yield name, [whole], None, None
        elif whole is not None and dim is None:
            raise _refusal(boundary, "cut in two")
        elif whole is not None:
            yield name, [whole], dim, chunk


def _refusal(boundary: Boundary, what: str) -> PassError:
    return PassError(
        f"cannot observe {boundary.name}: it cannot be {what}, as no single dim of it is the chunked dim",
        expected="a module whose output has batch and sequence as dims of their own, or that runs in chunks as a whole",
        found=f"an output of {boundary.module} that flattens them",
        fix="leave this module out of --observe",
    )
