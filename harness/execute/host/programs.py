"""Make programs from a case's graph: for a rank, with a fault, or as a precompiled step.

Imports torch only when a function needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bitproof.harness.case import GRAPH, PRECOMPILED, PREPARED, Case
from bitproof.harness.execute.requests import PrecompileAnswer, PrecompileRequest, StepFolder
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.machine.determinism import set_determinism

if TYPE_CHECKING:
    import torch

    from bitproof.harness.disturb.kinds import Fault


def needs_program(system: str) -> bool:
    """Whether a system runs a traced graph instead of the model's own code."""
    return system in PREPARED


def prepare_program(case: Case, device: torch.device, options: GraphOptions, *, system: str = GRAPH) -> Any:
    """Trace the case's training step and run the graph passes over it.

    Determinism switches must be set before this call.
    """
    import torch

    from bitproof.harness.systems.graph import prepare

    # torch chooses operators by these switches, for example for attention, and the trace contains these operators.
    assert torch.are_deterministic_algorithms_enabled(), "a program is traced under determinism switches"
    assert device.type == "cpu" or device.index in (None, torch.cuda.current_device()), "and on the current device"
    return prepare(case, device, options, system)


def options_of_rank(options: GraphOptions, rank: int) -> GraphOptions:
    # All ranks' graphs are equal.
    return options if rank == 0 else replace(options, dump_dir=None)


def with_fault(program: Any, fault: Fault | None, case: Case) -> Any:
    """Return the program with a deliberate fault in its graph. A fault that does not edit the graph leaves the program
    unchanged.

    Raises UsageError if the graph has no call that the fault could change.
    """
    entry = None if fault is None else fault.row
    if entry is None or entry.edit is None or program is None:
        return program
    from bitproof.harness.systems.graph import mutate_program

    return mutate_program(program, entry, case)


def read_precompiled(case: Case, device: torch.device, step: StepFolder, system: str) -> Any:
    """Return the program of a precompiled step, read from its folder without tracing and without passes.

    Raises ArtifactError if the step was made by other code or for another case, or is damaged.
    """
    from bitproof.harness.precompile.artifact import read_program

    return read_program(step.path, case, _traced_system(system), device, step.trust_compiled)


def precompile_step(request: PrecompileRequest, enter: Callable[[str], None]) -> PrecompileAnswer:
    import torch

    from bitproof.harness.precompile.artifact import precompile

    set_determinism(request.case.seed)
    device = torch.device(request.device)
    made = precompile(request.case, _traced_system(request.system), device, request.out, request.inject, enter)
    return PrecompileAnswer(**made._asdict())


def _traced_system(system: str) -> str:
    # A precompiled step is a stored graph of the system `graph`.
    return GRAPH if system == PRECOMPILED else system
