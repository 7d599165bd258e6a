"""The planned cuts of a graph into stages, for passes that run before the cut."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.fx import Node

from bitproof.harness.case import stage_of_layer
from bitproof.harness.graph.origin import origin_of

_LAYER = re.compile(r"layers\.(\d+)(\.|$)")


@dataclass(frozen=True)
class Cuts:
    """The division of layers into stages."""

    num_stages: int = 1
    num_layers: int = 1

    def stage_of(self, node: Node) -> int | None:
        """The stage of a call's layer; None without a layer."""
        found = _LAYER.match(origin_of(node).module or "")
        if found is None or self.num_stages == 1:
            return 0 if found else None
        return stage_of_layer(int(found[1]), self.num_layers, self.num_stages)

    def crosses(self, node: Node) -> bool:
        """Whether layers of another stage read a layer's value."""
        own = self.stage_of(node)
        return own is not None and any(self.stage_of(user) not in (None, own) for user in node.users)
