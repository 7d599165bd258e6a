"""The result of partitioning a step into a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The sizes of the forward and the backward graph, and of the tensors saved between them.

    - `by`: the partitioning method.
    - `nodes_joint`: the nodes before partitioning. Node counts include a graph's inputs and output.
    - `saved`, `saved_bytes`: number and bytes of the tensors of forward that backward uses, without graph inputs.
    - `uncut`, `uncut_bytes`: the same two numbers for a partition without recomputation.
    - `recomputed`: the number of calls that backward computes again.
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
        """Return the partition that a pass reports; None if no pass partitions. `facts` are the facts of all passes."""
        # A pass that partitions is known by its facts, which have exactly these names.
        names = {field.name for field in fields(Partition)}
        return next((Partition(**each) for each in facts if each.keys() == names), None)

    def table_rows(self) -> list[tuple[str, str]]:
        return [
            ("nodes of the joint graph", str(self.nodes_joint)),
            ("nodes of forward", str(self.nodes_forward)),
            ("nodes of backward", str(self.nodes_backward)),
            ("tensors saved between them", f"{self.saved} of {self.uncut}"),
            ("bytes saved between them", f"{self.saved_bytes} of {self.uncut_bytes}"),
            ("calls computed again", str(self.recomputed)),
        ]
