"""Where a graph's node belongs: what its own metadata says, whoever traced it.

Graphs of this package carry an `Origin` and a chunk. A foreign graph says it by plain values, no import needed:

    node.meta["bitproof"] = {"module": "layers.0.mlp", "direction": "backward", "chunk": 1, "source": "model.py:12"}

All four are optional; `harness.systems.registry` tells users of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from harness.errors import UsageError
from harness.graph.origin import META_KEY, Origin
from harness.graph.writer import CHUNK_KEY
from harness.localize.calls import Place

FOREIGN_KEY = "bitproof"
_DIRECTIONS = ("forward", "backward", "update")
_TYPES: Mapping[str, Any] = {"module": str, "direction": str, "chunk": int, "source": str}


def place_of(node: Node) -> tuple[Place, str | None]:
    """A node's place and the user's line, None for each thing that nothing tells.

    Raises UsageError for metadata that is not as `harness.systems.registry` says.
    """
    if FOREIGN_KEY in node.meta:
        said = _checked(node)
        return Place(said.get("module"), said.get("direction"), said.get("chunk")), said.get("source")
    origin = node.meta.get(META_KEY)
    if not isinstance(origin, Origin):
        return Place(None, None, node.meta.get(CHUNK_KEY)), None
    return Place(origin.module, origin.direction, node.meta.get(CHUNK_KEY)), origin.source


def _checked(node: Node) -> Mapping[str, Any]:
    said = node.meta[FOREIGN_KEY]
    is_right = isinstance(said, Mapping) and all(
        name in _TYPES and (value is None or isinstance(value, _TYPES[name])) for name, value in said.items()
    )
    if not is_right or said.get("direction") not in (None, *_DIRECTIONS):
        raise UsageError(
            f"node {node.name} of a system's graph says where it belongs in a form that is not known",
            expected="a mapping with some of module (text), direction (forward, backward or update), chunk (number), "
            "source (text)",
            found=repr(said),
            where=f'node.meta["{FOREIGN_KEY}"]',
        )
    return said
