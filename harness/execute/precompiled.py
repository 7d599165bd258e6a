"""Precompiled steps as runs meet them: made for a case by a process without ranks, read by the one that forks ranks.

Who runs the system `precompiled` and names no folder has the step made at the start of the case's run, in a process of
its own, which ends then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.case import GRAPH, PRECOMPILED, PREPARED, Case, refuse_compiled
from harness.errors import CaseError, UsageError
from harness.execute.requests import PrecompileAnswer, PrecompileRequest
from harness.execute.transport import refuse_torchrun
from harness.machine.determinism import set_determinism
from harness.records import Event

if TYPE_CHECKING:
    import torch

    from harness.execute.session import Desk
    from harness.machine.devices import Placement
    from harness.options import OnEvent, Role, RunOptions


HOST_MARGIN = 15.0
"""A stage watches its time itself and says more about it; its host gets this much longer, in seconds."""


class PrecompiledStep:
    """The folder of the step that a side of a case reads; what was made for the case ends with its run."""

    def __init__(self, case: Case, options: RunOptions, placement: Placement, desk: Desk) -> None:
        self._case = case
        self._options = options
        self._placement = placement
        self._desk = desk
        self._is_made = False
        self._is_asked = threading.Lock()

    def folder_for(self, role: Role, timeout: float, on_event: OnEvent) -> Path | None:
        """The folder, None for a side that reads none. Made now, within `timeout` seconds, where nobody made it."""
        system = getattr(self._case, role)
        if role == "candidate" and self._options.precompiled is not None:
            return self._options.precompiled.resolve()
        if system != PRECOMPILED:
            return None
        folder = (self._desk.work / f"{self._case.name}-precompiled").resolve()
        with self._is_asked:  # of runs that go side by side
            if not self._is_made:
                device = self._placement.device
                request = PrecompileRequest(case=self._case, system=system, out=folder, device=device, timeout=timeout)
                on_event(Event(event="prepare", case=self._case.name, system=system, arm="first"))
                self._desk.ask(request, timeout + HOST_MARGIN, on_event)
                on_event(Event(event="prepared", case=self._case.name, system=system, arm="first"))
                self._is_made = True
        return folder


def check_precompiled(case: Case, options: RunOptions) -> None:
    """Refuse what does not go with a precompiled step, before anything starts.

    Raises UsageError and CaseError: for a candidate that runs no graph or a compiled one, for passes that would run
    over it or dumps of them, and for a system `precompiled` that one of torchrun's ranks would have to make for all.
    """
    if options.precompiled is None:
        if PRECOMPILED in (case.reference, case.candidate):
            refuse_torchrun("run", "makes no step for other machines: precompile it, and give --precompiled DIR")
        _refuse_passes(options, [role for role in (case.candidate,) if role == PRECOMPILED])
        return
    if case.candidate not in PREPARED:
        raise CaseError(
            f"the candidate of case {case.name} runs no graph, so it reads none",
            expected="the candidate graph, joint or precompiled with --precompiled",
            found=f"candidate {case.candidate}",
            fix="leave the case out with -k, or give --candidate precompiled",
        )
    refuse_compiled(case)
    _refuse_passes(options, [case.candidate])


def _refuse_passes(options: RunOptions, candidates: list[str]) -> None:
    given = {"--extra-pass": bool(options.extra_passes), "--dump-graphs": options.dump_graphs}
    if candidates and (found := [name for name, is_given in given.items() if is_given]):
        raise UsageError(
            f"{found[0]} is about passes, and none runs over a precompiled step",
            expected="a step that is traced where it runs",
            found=", ".join(found),
            fix="leave it out, or run the case without --precompiled and with the candidate graph",
        )


def read_precompiled(case: Case, device: torch.device, folder: Path, system: str) -> Any:
    """The program of a precompiled step. Nothing is traced, no pass runs. Raises ArtifactError for one to refuse."""
    from harness.precompile.artifact import read_program

    return read_program(folder, case, _made_as(system), device)


def precompile_step(request: PrecompileRequest, enter: Callable[[str], None]) -> PrecompileAnswer:
    """Precompile a case's step. Raises what `harness.precompile.artifact.precompile` does."""
    import torch

    from harness.precompile.artifact import precompile

    set_determinism(request.case.seed)
    device = torch.device(request.device)
    made = precompile(request.case, _made_as(request.system), device, request.out, request.inject, enter)
    return PrecompileAnswer(**made._asdict())


def _made_as(system: str) -> str:
    """The system whose tracer made a precompiled step."""
    return GRAPH if system == PRECOMPILED else system
