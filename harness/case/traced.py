"""The systems that run a traced graph, and what the second of them refuses of a case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import CaseError

if TYPE_CHECKING:
    from harness.case.case import Case

GRAPH, JOINT = "graph", "joint"
TRACED = (GRAPH, JOINT)
"""The systems that run a graph which our passes rewrite: as our own tracer records it, and as torch exports it."""


def check_joint(case: Case) -> None:
    """Raise CaseError for a case of the system joint with what only chunks, or graphs that are one, can have."""
    if JOINT not in (case.reference, case.candidate):
        return
    refused = {
        "chunking": case.chunking is not None,
        "pipeline.overlap": case.pipeline.overlap,
        "memory.policy='offload'": case.memory.policy == "offload",
    }
    if found := [name for name, is_set in refused.items() if is_set]:
        raise CaseError(
            f"case {case.name} asks the system joint for what it does not do",
            expected="no chunks, so no overlap of their exchanges; memory by the policies none, selective or full",
            found=", ".join(found),
            fix="leave it out, or choose the system graph",
        )
