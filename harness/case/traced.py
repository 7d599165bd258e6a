"""Define the systems that run a traced graph, the settings of the graph pipeline, and the cases that it refuses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from bitproof.harness.case.patterns import check_pattern
from bitproof.harness.errors import CaseError
from bitproof.harness.validate import STRICT

if TYPE_CHECKING:
    from bitproof.harness.case.case import Case

GRAPH, JOINT, AUTOPLACE = "graph", "joint", "autoplace"
TRACED = (GRAPH, JOINT, AUTOPLACE)
"""The systems whose graph bitproof's passes rewrite.

The graph of `graph` is recorded by bitproof's own tracer, that of `joint` is exported by torch, and that of `autoplace`
is recorded from a model with solved placements.
"""

PRECOMPILED = "precompiled"
"""The system that reads the finished graph of `graph` from disk, where a process without ranks wrote it before
the run.
"""
PREPARED = (*TRACED, PRECOMPILED)
"""The systems that run a graph which is made before their steps."""

COMPILED = "compiled"
"""The reference's own system with its models compiled by torch.compile, which captures graphs while it runs."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The optional passes of the graph pipeline, and the backend that runs the finished graph.

    - `isolate_groups`: the experts' all-to-alls get their own process group if they share a group with other
      collectives.
    - `isolate_gathers`: likewise, all-gathers of parameters get their own process group.
    - `bucket`: joins the all-gathers of a block into larger ones, and its reduce-scatters likewise.
    - `overlap`: reorders calls so that the all-to-all of a chunk runs during the other chunk's compute.
    - `overlap_costs`: path of a cost model for this order, fitted to a machine. None: bitproof's cost model, fitted to
      a CPU.
    - `dense_traffic`: moves all-gathers of parameters and reduce-scatters of gradients to where no all-to-all is in
      flight.
    - `async_tensor`: reorders calls as `overlap` does, for gathers, sums and reduce-scatters of a tensor group.
    - `backend`: how the finished graph runs:

        - "fx": operator by operator.
        - "regional_inductor": with compiled regions; by default, only attention operators are compiled.
        - "inductor": compiled as a whole. It rounds less often, so expect CLOSE.
        - "cuda_graph": captured once and replayed with static inputs and outputs. On a CPU its calls run in sequence.

    - `regions`: for "regional_inductor", patterns over module names, as in `Chunking`. Each call of a matching module
      is compiled, separately for forward, backward and each chunk.
    - `until`: the last pass to apply, "" for none. Later passes and the backend are left out. None applies all.
    """

    __pydantic_config__ = STRICT

    isolate_groups: bool = False
    isolate_gathers: bool = False
    bucket: bool = False
    overlap: bool = False
    overlap_costs: str | None = None
    dense_traffic: bool = False
    async_tensor: bool = False
    backend: Literal["fx", "regional_inductor", "inductor", "cuda_graph"] = "fx"
    regions: tuple[str, ...] = ()
    until: str | None = None

    def __post_init__(self) -> None:
        for pattern in self.regions:
            check_pattern(pattern, "a region's pattern")
        if self.regions and self.backend != "regional_inductor":
            raise CaseError(
                "regions are marked for a backend that compiles none",
                expected="backend='regional_inductor' with regions=(...), or regions=()",
                found=f"backend={self.backend!r}, regions={self.regions!r}",
            )

    @property
    def compiles(self) -> bool:
        """Whether a backend compiles the finished graph, whole or in regions."""
        return self.backend in ("regional_inductor", "inductor") and self.until is None

    @property
    def captures(self) -> bool:
        """Whether the finished graph is captured as a CUDA graph."""
        return self.backend == "cuda_graph" and self.until is None


OPTIONAL_PASSES = tuple(field.name for field in fields(Pipeline) if field.default is False)
"""The names of the settings that switch on optional passes."""


def check_traced(case: Case) -> None:
    _check_autoplace(case)
    _check_precompiled(case)
    _check_compiled(case)
    _check_captured(case)


def _check_autoplace(case: Case) -> None:
    is_asked = AUTOPLACE in (case.reference, case.candidate)
    # A case with a plan needs no solver, so it may run other systems.
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


def _check_precompiled(case: Case) -> None:
    if PRECOMPILED in (case.reference, case.candidate):
        refuse_unwritten(case)


def _check_compiled(case: Case) -> None:
    if COMPILED not in (case.reference, case.candidate):
        return
    # The candidate compiles the reference's system, which must therefore be a user's.
    if case.reference in (COMPILED, "eager", "eager_chunked", *PREPARED):
        raise CaseError(
            f"case {case.name} asks the system compiled for what it does not do",
            expected="the candidate compiled, of a reference of your own: its models are compiled",
            found=f"reference {case.reference}, candidate {case.candidate}",
            fix="give --reference FILE.py:FACTORY",
        )
    pipeline = case.pipeline
    # torch.compile makes the graphs, so no pass of bitproof's pipeline applies to them.
    found = [f"pipeline.{name}" for name in OPTIONAL_PASSES if getattr(pipeline, name)]
    if pipeline.backend in ("regional_inductor", "cuda_graph"):
        found.append(f"pipeline.backend={pipeline.backend!r}")
    if found:
        raise CaseError(
            f"case {case.name} asks the system compiled for what it does not do",
            expected="the backend fx or inductor, and no pass of the graph pipeline",
            found=", ".join(found),
            fix="leave it out",
        )


def _check_captured(case: Case) -> None:
    # A replay of a captured graph runs no Python code that could observe.
    if case.pipeline.captures and case.observe:
        raise CaseError(
            f"case {case.name} observes activations of a step that is replayed as a CUDA graph",
            expected="observe=() with pipeline.backend='cuda_graph'",
            found=f"observe={case.observe}",
            fix="leave out `observe`, or choose the backend fx",
        )


def refuse_unwritten(case: Case) -> None:
    """Raise CaseError for a case whose step cannot be precompiled, i.e. stored as plain data.

    The operators that observe activations are Python objects. Placements and stages are decided
    only when a case runs.
    """
    if case.autoplace is not None:
        raise CaseError(
            f"the step of case {case.name} is placed when the case runs, and is not precompiled",
            expected="a case without `autoplace`",
            found=f"autoplace={case.autoplace}",
            fix="leave the case out, or run it without --precompiled",
        )
    if case.schedule is not None:
        raise CaseError(
            f"the step of case {case.name} is cut into stages when the case runs, and is not precompiled",
            expected="a case without `schedule`",
            found=f"schedule={case.schedule}",
            fix="leave the case out, or run it without --precompiled",
        )
    if case.observe:
        raise CaseError(
            f"the step of case {case.name} shows activations, and what looks at them is not precompiled",
            expected="a case that observes nothing",
            found=f"observe={case.observe}",
            fix="leave out `observe`",
        )
