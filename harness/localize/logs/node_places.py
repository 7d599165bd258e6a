"""Where a graph's node belongs: its module, direction and chunk by its own metadata.

Graphs of this package carry an `Origin` and a chunk. A foreign graph says it by plain values, no import needed:

    node.meta["bitproof"] = {"module": "layers.0.mlp", "direction": "backward", "chunk": 1, "source": "model.py:12"}

These are optional, and so is "part"; `harness.systems.registry` documents them for users. Torch's own annotations,
which `origin` reads, state the part as well.

A node that a user's pass made has none of them: it belongs where the nearest of the nodes that it reads belong or,
where those have none either, the nearest of those that read it; where nothing before and after it has a place, as
between a buffer and its write, the nearest of all. One that writes a buffer in place belongs where another node writes
it so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch.fx import GraphModule, Interpreter, Node

from bitproof.harness.errors import UsageError
from bitproof.harness.graph.operators import written_arguments
from bitproof.harness.graph.origin import META_KEY, UNKNOWN, Origin, origin_of, part_in
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.localize.logs.calls import Place

FOREIGN_KEY = "bitproof"
_DIRECTIONS = ("forward", "backward", "update")
_TYPES: Mapping[str, Any] = {"module": str, "direction": str, "chunk": int, "source": str, "part": str}


def place_of(node: Node) -> tuple[Place, str | None]:
    """A node's place and the user's line, None for each thing that is unknown.

    Raises UsageError for metadata that is not as `harness.systems.registry` says.
    """
    if FOREIGN_KEY in node.meta:
        said = _checked(node)
        return Place(said.get("module"), said.get("direction"), said.get("chunk")), said.get("source")
    origin = node.meta.get(META_KEY)
    if not isinstance(origin, Origin):
        return Place(None, None, node.meta.get(CHUNK_KEY)), None
    if origin == UNKNOWN:
        nearest = _other_writers(node) or _nearest(node, lambda node: node.all_input_nodes)
        nearest = nearest or _nearest(node, lambda node: node.users)
        nearest = nearest or _nearest(node, lambda node: [*node.all_input_nodes, *node.users])
        return _common(nearest, node.meta.get(CHUNK_KEY)), None
    return Place(origin.module, origin.direction, node.meta.get(CHUNK_KEY)), origin.source


def part_of(node: Node) -> str | None:
    """Which part of its module a node computes; None where nothing says it."""
    if FOREIGN_KEY in node.meta:
        part: str | None = _checked(node).get("part")
        return part
    return origin_of(node).part or part_in(node.meta.get("custom") or {})


def _other_writers(node: Node) -> list[Node]:
    """The nodes with an origin that write in place what a node writes, by the same operator."""
    written = written_arguments(node) if node.op == "call_function" else []
    users = [user for x in written for user in x.users if user.target == node.target]
    return [user for user in users if user.meta.get(META_KEY, UNKNOWN) != UNKNOWN]


def _nearest(node: Node, step: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """The nodes with an origin that are the fewest steps away, in the order in which steps reach them."""
    seen, reached = {node}, [node]
    while reached:
        reached = list(dict.fromkeys(near for far in reached for near in step(far) if near not in seen))
        if known := [near for near in reached if near.meta.get(META_KEY, UNKNOWN) != UNKNOWN]:
            return known
        seen.update(reached)
    return []


def _common(nodes: list[Node], chunk: int | None) -> Place:
    """Where the nodes belong: with one in backward to backward, to the first one's module, and to their one chunk."""
    if not nodes:
        return Place(None, None, chunk)
    first = next((node for node in nodes if node.meta[META_KEY].direction == "backward"), nodes[0])
    chunks = {node.meta.get(CHUNK_KEY) for node in nodes} if chunk is None else {chunk}
    origin = first.meta[META_KEY]
    return Place(origin.module, origin.direction, chunks.pop() if len(chunks) == 1 else None)


def _checked(node: Node) -> Mapping[str, Any]:
    said = node.meta[FOREIGN_KEY]
    is_right = isinstance(said, Mapping) and all(
        name in _TYPES and (value is None or isinstance(value, _TYPES[name])) for name, value in said.items()
    )
    if not is_right or said.get("direction") not in (None, *_DIRECTIONS):
        raise UsageError(
            f"node {node.name} of a system's graph says where it belongs in a form that is not known",
            expected="a mapping with some of module (text), direction (forward, backward or update), chunk (number), "
            "source (text), part (text)",
            found=repr(said),
            where=f'node.meta["{FOREIGN_KEY}"]',
        )
    return said


class ToldNodes(Protocol):
    """What wants to know which node runs."""

    node: Node | None


class GraphRunner(Interpreter):
    """Runs a graph node by node, telling `places` which."""

    def __init__(self, module: GraphModule, places: ToldNodes) -> None:
        super().__init__(module)
        self._places = places

    def run_node(self, node: Node) -> Any:
        """Run one node."""
        self._places.node = node
        try:
            return super().run_node(node)
        finally:
            self._places.node = None
