"""Describes the regions that the chunk pass matched, each in a line with the sizes of its inputs and outputs.

A region is all nodes of a chosen module in a direction, forward or backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch.fx import Node

from bitproof.harness.graph.origin import Direction, origin_of


class Region(NamedTuple):
    """The nodes of a chosen module in a direction.

    - `live_ins`: the tensors that they read from nodes outside.
    - `live_outs`: their tensors that nodes outside read.
    """

    module: str
    direction: Direction
    num_nodes: int
    live_ins: tuple[Node, ...]
    live_outs: tuple[Node, ...]

    def __str__(self) -> str:
        return (
            f"{self.module} ({self.direction}): {self.num_nodes} nodes; "
            f"live-ins {_listed(self.live_ins)}; live-outs {_listed(self.live_outs)}"
        )


def regions_of(roots: Mapping[Node, str | None]) -> Iterator[Region]:
    """Yield the regions, in graph order.

    `roots` maps each node to its chosen module, or to None outside chosen modules.
    """
    inside: dict[tuple[str, Direction], dict[Node, None]] = {}
    for node, root in roots.items():
        if root is not None:
            inside.setdefault((root, origin_of(node).direction), {})[node] = None
    for (module, direction), nodes in inside.items():
        # `_tensors` drops repetitions, and values that are no tensors.
        read = (x for node in nodes for x in node.all_input_nodes if x not in nodes)
        given = (node for node in nodes if any(user not in nodes for user in node.users))
        yield Region(module, direction, len(nodes), _tensors(read), _tensors(given))


def _tensors(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)))


def _listed(nodes: tuple[Node, ...]) -> str:
    return f"{len(nodes)}" + (f" ({', '.join(map(_sized, nodes))})" if nodes else "")


def _sized(node: Node) -> str:
    value = node.meta["val"]
    return f"{node.name} {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
