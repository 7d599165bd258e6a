"""The systems that run a traced graph, and what some of them refuse of a case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import CaseError

if TYPE_CHECKING:
    from harness.case.case import Case

GRAPH, JOINT = "graph", "joint"
TRACED = (GRAPH, JOINT)
"""The systems that run a graph which our passes rewrite: as our own tracer records it, and as torch exports it."""

PRECOMPILED = "precompiled"
"""The system graph, whose finished graph ranks read from disk: a process without ranks wrote it there before."""
PREPARED = (*TRACED, PRECOMPILED)
"""The systems that run a graph which was prepared, wherever."""


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


def check_precompiled(case: Case) -> None:
    """Raise CaseError for a case of the system precompiled that a backend compiles: see `refuse_compiled`."""
    if PRECOMPILED in (case.reference, case.candidate):
        refuse_compiled(case)


def refuse_compiled(case: Case) -> None:
    """Raise CaseError for a case whose graph a backend compiles: compiled code is no data, so it is not precompiled."""
    if case.pipeline.backend == "fx" or case.pipeline.until is not None:
        return
    raise CaseError(
        f"the step of case {case.name} is compiled by {case.pipeline.backend}, and compiled code is not precompiled",
        expected="pipeline.backend fx: a precompiled step is a graph as data, from which no code is loaded",
        found=f"pipeline.backend {case.pipeline.backend}",
        fix="leave the case out, or run it without --precompiled",
    )
