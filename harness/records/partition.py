"""What came of dividing a step into a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Both graphs' sizes, and what lives across the border between them. `by` is the way in which it was chosen.

    Nodes are all of a graph's, its inputs and its output among them; the joint graph is what was divided. `saved` are
    tensors of forward that backward reads, `saved_bytes` the bytes of their storages; graph inputs count in neither.
    `uncut` and `uncut_bytes` are what would be saved were nothing computed again; `recomputed` are calls that are.
    """

    __pydantic_config__ = GROWING

    by: str
    nodes_joint: Count
    nodes_forward: Count
    nodes_backward: Count
    saved: Count
    saved_bytes: Count
    uncut: Count
    uncut_bytes: Count
    recomputed: Count

    @staticmethod
    def of(facts: Sequence[Mapping[str, Any]]) -> Partition | None:
        """The facts of the pass that divided a graph, among those of all passes; None where none did."""
        names = {field.name for field in fields(Partition)}
        return next((Partition(**told) for told in facts if told.keys() == names), None)

    def tell(self) -> list[tuple[str, str]]:
        """What reports show of it, as names and values."""
        return [
            ("nodes of the joint graph", str(self.nodes_joint)),
            ("nodes of forward", str(self.nodes_forward)),
            ("nodes of backward", str(self.nodes_backward)),
            ("tensors saved between them", f"{self.saved} of {self.uncut}"),
            ("bytes saved between them", f"{self.saved_bytes} of {self.uncut_bytes}"),
            ("calls computed again", str(self.recomputed)),
        ]
