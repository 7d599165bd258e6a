"""The division of a model's layers into pipeline stages."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.fx import Node

from bitproof.harness.case import stage_of_layer
from bitproof.harness.graph.origin import origin_of

_LAYER = re.compile(r"layers\.(\d+)(\.|$)")

STAGE_KEY = "stage"
"""The metadata key of a call's stage, in a graph that was joined from its stages' graphs."""


@dataclass(frozen=True)
class Cuts:
    """The division of a model's layers into pipeline stages: the numbers of stages and of layers."""

    num_stages: int = 1
    num_layers: int = 1

    def stage_of(self, node: Node) -> int | None:
        """Return the number of a call's stage, from its metadata or by its module's layer; None if it has neither."""
        stage: int | None = node.meta.get(STAGE_KEY)
        return self.stage_of_module(origin_of(node).module or "") if stage is None else stage

    def stage_of_module(self, name: str) -> int | None:
        """Return the number of the stage that contains a module's layer; None for a module outside all layers."""
        found = _LAYER.match(name)
        if found is None or self.num_stages == 1:
            return 0 if found else None
        return stage_of_layer(int(found[1]), self.num_layers, self.num_stages)
