"""The place of a graph's node: module, direction and chunk, from the node's metadata.

bitproof's own graphs have these as an `Origin` and a chunk number. A user's graph states them as plain values:

    node.meta["bitproof"] = {"module": "layers.0.mlp", "direction": "backward", "chunk": 1, "source": "model.py:12"}

All of these are optional, and so is "part". `harness.systems.registry` documents them for users.

A node that a user's pass added to bitproof's graph has no place. It gets the place of other nodes, searched in this
order:

1. nodes that write the same buffer in place,
2. the nearest nodes among its inputs, their inputs, and so on,
3. the nearest nodes among its readers,
4. the nearest nodes in either direction, for example between a buffer and its write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch.fx import GraphModule, Interpreter, Node

from bitproof.harness.errors import UsageError
from bitproof.harness.graph.operators import written_arguments
from bitproof.harness.graph.origin import META_KEY, UNKNOWN, Origin, origin_of, part_in
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.localize.logs.calls import CallSite

FOREIGN_KEY = "bitproof"
_DIRECTIONS = ("forward", "backward", "update")
_TYPES: Mapping[str, Any] = {"module": str, "direction": str, "chunk": int, "source": str, "part": str}


def place_of(node: Node) -> tuple[CallSite, str | None]:
    """Return a pair: a node's place, and the line of the user's code that made it. What is unknown is None.

    Raises UsageError for a user's metadata in another form than `harness.systems.registry` documents.
    """
    if FOREIGN_KEY in node.meta:
        stated = _checked(node)
        return CallSite(stated.get("module"), stated.get("direction"), stated.get("chunk")), stated.get("source")
    origin = node.meta.get(META_KEY)
    if not isinstance(origin, Origin):
        return CallSite(None, None, node.meta.get(CHUNK_KEY)), None
    # A node that a user's pass added: see the top of this file for the order.
    if origin == UNKNOWN:
        nearest = _other_writers(node) or _nearest(node, lambda node: node.all_input_nodes)
        nearest = nearest or _nearest(node, lambda node: node.users)
        nearest = nearest or _nearest(node, lambda node: [*node.all_input_nodes, *node.users])
        return _common(nearest, node.meta.get(CHUNK_KEY)), None
    return CallSite(origin.module, origin.direction, node.meta.get(CHUNK_KEY)), origin.source


def part_of(node: Node) -> str | None:
    """Return the part of a module that a node computes, such as "dispatch" in a mixture of experts; None if unknown."""
    if FOREIGN_KEY in node.meta:
        part: str | None = _checked(node).get("part")
        return part
    return origin_of(node).part or part_in(node.meta.get("custom") or {})


def _other_writers(node: Node) -> list[Node]:
    """Return the nodes of known origin that write, by the same operator, the tensors that `node` writes in place."""
    written = written_arguments(node) if node.op == "call_function" else []
    users = [user for x in written for user in x.users if user.target == node.target]
    return [user for user in users if user.meta.get(META_KEY, UNKNOWN) != UNKNOWN]


def _nearest(node: Node, step: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return the nodes of known origin that are nearest to `node`, all at the same distance.

    `step` returns a node's neighbours, such as its inputs.
    """
    seen, reached = {node}, [node]
    # `reached` has all nodes at the same distance, and then those that are a step further away.
    while reached:
        reached = list(dict.fromkeys(near for far in reached for near in step(far) if near not in seen))
        if known := [near for near in reached if near.meta.get(META_KEY, UNKNOWN) != UNKNOWN]:
            return known
        seen.update(reached)
    return []


def _common(nodes: list[Node], chunk: int | None) -> CallSite:
    """Return a common place for several nodes: that of the first backward node or, if there is none, of the first node.

    The chunk of the place is `chunk`. If `chunk` is None, it is the chunk of all nodes, or None if their chunks differ.
    """
    if not nodes:
        return CallSite(None, None, chunk)
    first = next((node for node in nodes if node.meta[META_KEY].direction == "backward"), nodes[0])
    chunks = {node.meta.get(CHUNK_KEY) for node in nodes} if chunk is None else {chunk}
    origin = first.meta[META_KEY]
    return CallSite(origin.module, origin.direction, chunks.pop() if len(chunks) == 1 else None)


def _checked(node: Node) -> Mapping[str, Any]:
    stated = node.meta[FOREIGN_KEY]
    is_right = isinstance(stated, Mapping) and all(
        name in _TYPES and (value is None or isinstance(value, _TYPES[name])) for name, value in stated.items()
    )
    if not is_right or stated.get("direction") not in (None, *_DIRECTIONS):
        raise UsageError(
            f"node {node.name} of a system's graph states its place in an unknown form",
            expected="a mapping with some of module (text), direction (forward, backward or update), chunk (number), "
            "source (text), part (text)",
            found=repr(stated),
            where=f'node.meta["{FOREIGN_KEY}"]',
        )
    return stated


class HasNode(Protocol):
    """An object with an attribute `node`, which a `GraphRunner` sets to the node that runs."""

    node: Node | None


class GraphRunner(Interpreter):
    """Runs a graph node by node, and sets `places.node` to the node that runs."""

    def __init__(self, module: GraphModule, places: HasNode) -> None:
        super().__init__(module)
        self._places = places

    def run_node(self, node: Node) -> Any:
        """Run a node, with `places.node` set to it."""
        self._places.node = node
        try:
            return super().run_node(node)
        finally:
            self._places.node = None
