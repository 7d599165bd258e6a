"""The systems that run a traced graph, and what two of them refuse of a case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import CaseError

if TYPE_CHECKING:
    from harness.case.case import Case

GRAPH, JOINT, AUTOPLACE = "graph", "joint", "autoplace"
TRACED = (GRAPH, JOINT, AUTOPLACE)
"""The systems that run a graph which our passes rewrite: as our own tracer records it, as torch exports it, and as our
own tracer records a model whose placements were solved for."""


def check_traced(case: Case) -> None:
    """Raise CaseError for a case that asks the system joint or autoplace for what it does not do."""
    _check_joint(case)
    _check_autoplace(case)


def _check_joint(case: Case) -> None:
    """Refuse what only chunks, or graphs that are one, can have."""
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


def _check_autoplace(case: Case) -> None:
    """Refuse the system without a bound, or with chunks; and a bound without it, unless the case states its plan."""
    is_asked = AUTOPLACE in (case.reference, case.candidate)
    if is_asked != (case.autoplace is not None) and not (case.autoplace and case.autoplace.plan):
        raise CaseError(
            f"case {case.name} must bound a rank's memory exactly when the system autoplace is one of its two",
            expected="autoplace=Autoplace(memory_mib=...) with the system autoplace, or neither",
            found=f"autoplace={case.autoplace!r}, systems {case.reference} and {case.candidate}",
        )
    if case.autoplace is not None and (case.chunking is not None or case.memory.policy != "none"):
        raise CaseError(
            f"case {case.name} asks the system autoplace for what it does not do",
            expected="no chunks, and the memory policy none: its program counts every activation once, as saved",
            found=f"chunking={case.chunking!r}, memory.policy={case.memory.policy!r}",
            fix="leave it out, or choose the system graph",
        )
