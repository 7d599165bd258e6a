"""Activations at module boundaries of a graph: marked as they are traced, shown as the finished graph computes them.

Needs:    a trace with a node for every marked tensor; passes that copy a node's metadata to what they write.
Promises: the calls of the graph as passes left them, in their order; beside them, calls that only look.
Refuses:  a boundary that has no such form: one whose chunks would have to be joined or cut along a dim that is none.

1. While a step is traced, hooks see what observed modules return, and the gradients of that; their nodes are marked.
   Marks are metadata: no pass does anything else because of them.
2. When all passes have run, each mark becomes a call of `observed` right after the node, or the chunks' nodes.
3. What the trace has whole and eager once a chunk, or the other way round, is cut, or joined with chunk 0 first.
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
"""Where a node's metadata has the marks of the boundaries that it is."""


class Mark(NamedTuple):
    """A boundary, as it was traced. `dim` is the one that is the chunked dim, None where none is.

    `carries` says whether its shape depends on the chunked dim at all.
    """

    boundary: Boundary
    dim: int | None
    carries: bool


_observers: list[Observe] = []


def observed(name: str, parts: list[Tensor], dim: int | None = None, piece: int | None = None) -> None:
    """Show an activation to whoever observes the step: what a graph calls, and no operator."""
    if _observers:
        _observers[-1]("activation", name, activation(parts, dim, piece))


def activation(parts: list[Tensor], dim: int | None = None, piece: int | None = None) -> Tensor:
    """The chunks' rows joined along `dim`, chunk 0 first; of that, with `piece`, one half."""
    with disable_current_modes(), torch.no_grad():
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim if dim is not None else 0)
        if piece is None or dim is None:
            return whole.detach()
        half = whole.shape[dim] // 2
        return whole.detach().narrow(dim, piece * half, half)


@contextmanager
def shown_to(observe: Observe) -> Iterator[None]:
    """Have `observe` called with what graphs show that run in this context."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.pop()


# 1. Marks.


@contextmanager
def marking(model: nn.Module, patterns: Sequence[str], tracer: Any, symbol: Any) -> Iterator[None]:
    """Mark what observed modules return, and its gradients, in the trace that is made in this context."""
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


def hand_on_marks(node: Node, to: Node) -> None:
    """Let a node that stands for another have its marks."""
    if MARKS_KEY in node.meta:
        to.meta[MARKS_KEY] = (*to.meta.get(MARKS_KEY, ()), *node.meta[MARKS_KEY])


class Marked(NamedTuple):
    """A marked node, and where others read it: by a reader's name, its places among what that reads."""

    node: Node
    readers: dict[str, list[int]]


def marked_nodes(graph: Graph) -> list[Marked]:
    """Every marked node, before somebody else's code changes the graph."""
    found = []
    for node in graph.nodes:
        if MARKS_KEY in node.meta:
            readers = {user.name: [i for i, x in enumerate(_read_by(user)) if x is node] for user in node.users}
            found.append(Marked(node, readers))
    return found


def hand_on_lost_marks(graph: Graph, before: Sequence[Marked]) -> None:
    """Let what is read in a marked node's place now, where that is gone, have its marks; a new node also its chunk."""
    nodes = {node.name: node for node in graph.nodes}
    for node, readers in before:
        if nodes.get(node.name) is not None:
            continue
        for name, places in readers.items():
            read = _read_by(nodes[name]) if name in nodes else []
            if places and places[-1] < len(read):
                to = read[places[0]]
                hand_on_marks(node, to)
                if META_KEY not in to.meta and CHUNK_KEY in node.meta:
                    to.meta[CHUNK_KEY] = node.meta[CHUNK_KEY]
                break


def _read_by(node: Node) -> list[Node]:
    """The nodes that a node reads, in the order of its arguments, each as often as it does."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


# 2. Calls that look.


def show_activations(module: GraphModule, chunking: Chunking | None) -> int:
    """Write a call of `observed` for each marked boundary, and return how many. Raises PassError: see above.

    `chunking` is what the graph was chunked by, None for a graph that was not. A boundary of which passes left no node
    is not shown: comparing then finds that its record is missing.
    """
    found: dict[Mark, dict[int | None, Node]] = {}
    for node in module.graph.nodes:
        if not node.meta.get(RECOMPUTED_KEY):
            for mark in node.meta.get(MARKS_KEY, ()):
                found.setdefault(mark, {}).setdefault(node.meta.get(CHUNK_KEY), node)
    shown = [show for mark, nodes in found.items() for show in _shows(mark, nodes, chunking)]
    put_in(module.graph, shown)
    module.recompile()
    return len(shown)


Show = tuple[str, list[Node], int | None, int | None]


def put_in(graph: Graph, shows: Sequence[Show]) -> None:
    """Write calls that look, each behind the last node that it looks at."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    first = next((node for node in order if node.op not in ("placeholder", "get_attr")), None)
    for name, parts, dim, piece in shows:
        last = max(parts, key=order.__getitem__)
        after_inputs = first is not None and order[last] < order[first]
        with graph.inserting_before(first) if after_inputs else graph.inserting_after(last):
            call = graph.call_function(observed, (name, parts, dim, piece))
        call.meta[META_KEY] = UNKNOWN


def take_out(graph: Graph) -> list[Show]:
    """Remove the calls that look, and return what `put_in` writes them of: for who reads and changes the others."""
    shows: list[Show] = []
    for node in graph.find_nodes(op="call_function", target=observed):
        name, parts, dim, piece = node.args
        shows.append((name, list(parts), dim, piece))
        graph.erase_node(node)
    return shows


def _shows(mark: Mark, nodes: dict[int | None, Node], chunking: Chunking | None) -> Iterator[Show]:
    """What is shown of a boundary: by name, the nodes that are joined, the dim, and the half that is taken."""
    boundary, dim = mark.boundary, mark.dim
    root = chunking.root_of(boundary.module) if chunking else None
    whole = nodes.get(None)
    if root is None or root == boundary.module:
        if whole is not None:
            yield boundary.name, [whole], None, None
        elif not mark.carries:
            yield boundary.name, [nodes[max(nodes, key=str)]], None, None
        elif dim is None:
            raise _refusal(boundary, "joined")
        elif 0 in nodes and 1 in nodes:
            yield boundary.name, [nodes[0], nodes[1]], dim, None
        return
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
