"""Find the precompiled step that a system reads instead of tracing, and refuse unsuitable steps and options.

The step is a folder that `bitproof precompile` wrote. Without --precompiled, the run itself writes such a folder at its
start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.case import PRECOMPILED, PREPARED, Case, refuse_unwritten
from bitproof.harness.errors import CaseError, UsageError
from bitproof.harness.execute.requests import PrecompileRequest, StepFolder, StepRequest
from bitproof.harness.execute.transport import refuse_torchrun
from bitproof.harness.records import Event

if TYPE_CHECKING:
    from pathlib import Path

    from bitproof.harness.execute.session import Client
    from bitproof.harness.machine.devices import Placement
    from bitproof.harness.options import OnEvent, Role, RunOptions


# The forked process reports more about a late step than the host could, so it must be first.
HOST_MARGIN = 15.0
"""The seconds that a host process gets beyond the time limit of its forked process."""


class PrecompiledStep:
    """The precompiled step that a case's run reads. A step that was made for this run is removed when the run ends."""

    def __init__(self, case: Case, options: RunOptions, placement: Placement, client: Client) -> None:
        self._case = case
        self._options = options
        self._placement = placement
        self._client = client
        self._is_made = False

    def check(self, timeout: float, on_event: OnEvent) -> None:
        """Raise ArtifactError if the step in the folder given by --precompiled does not suit the case. Call this before
        ranks run.

        The check takes at most `timeout` seconds. Does nothing without --precompiled.
        """
        if self._options.precompiled is None:
            return
        request = StepRequest(
            case=self._case,
            system=self._case.candidate,
            step=self._step_in(self._options.precompiled),
            device=self._placement.device,
            timeout=timeout,
        )
        self._client.ask(request, timeout + HOST_MARGIN, on_event)

    def _step_in(self, folder: Path) -> StepFolder:
        return StepFolder(folder.resolve(), self._options.trust_compiled)

    def folder_for(self, role: Role, timeout: float, on_event: OnEvent) -> StepFolder | None:
        """Return the folder of the precompiled step that a role's system reads; None if the system reads no such step.

        If this run must make the step itself, the first call of this method makes it, within `timeout` seconds.
        """
        system = getattr(self._case, role)
        if role == "candidate" and self._options.precompiled is not None:
            return self._step_in(self._options.precompiled)
        if system != PRECOMPILED:
            return None
        step = self._step_in(self._client.work / f"{self._case.name}-precompiled")
        if not self._is_made:
            device = self._placement.device
            request = PrecompileRequest(case=self._case, system=system, out=step.path, device=device, timeout=timeout)
            on_event(Event(event="prepare", case=self._case.name, system=system, arm="first"))
            self._client.ask(request, timeout + HOST_MARGIN, on_event)
            on_event(Event(event="prepared", case=self._case.name, system=system, arm="first"))
            self._is_made = True
        return step


def check_precompiled(case: Case, options: RunOptions) -> None:
    """Raise CaseError or UsageError if a case and options do not suit a precompiled step. Starts no process.

    These are refused:

    - a candidate that runs no graph, or a graph that cannot be stored,
    - compiled code without --trust-compiled,
    - extra passes and graph dumps,
    - under torchrun, the system `precompiled` without --precompiled.
    """
    # Without a folder, only the system `precompiled` reads a step, which the run makes itself. With a folder, any
    # candidate that runs a graph reads the step there.
    if options.precompiled is None:
        reads = PRECOMPILED in (case.reference, case.candidate)
        if options.trust_compiled and not reads:
            raise UsageError(
                f"--trust-compiled needs a precompiled step, and case {case.name} loads none",
                expected="--precompiled DIR, or the system precompiled",
                found=f"reference {case.reference}, candidate {case.candidate}",
            )
        _refuse_untrusted(case if reads else None, options)
        if reads:
            refuse_torchrun("run", "makes no step for other machines: precompile it, and give --precompiled DIR")
        _refuse_passes(options, [role for role in (case.candidate,) if role == PRECOMPILED])
        return
    if case.candidate not in PREPARED:
        raise CaseError(
            f"the candidate of case {case.name} runs no graph, so it cannot load one",
            expected="the candidate graph, joint or precompiled with --precompiled",
            found=f"candidate {case.candidate}",
            fix="leave the case out with -k, or give --candidate precompiled",
        )
    refuse_unwritten(case)
    _refuse_untrusted(case, options)
    _refuse_passes(options, [case.candidate])


def _refuse_untrusted(case: Case | None, options: RunOptions) -> None:
    # Compiled code may do anything when it is loaded, so reading it needs the user's consent.
    if case is not None and case.pipeline.compiles and not options.trust_compiled:
        raise CaseError(
            f"the precompiled step of case {case.name} is code that {case.pipeline.backend} compiled, "
            "and nothing says that it may run",
            expected="--trust-compiled: a hash shows that code is what was written, never what it does",
            found=f"pipeline.backend {case.pipeline.backend}",
            fix="add --trust-compiled, if you trust everyone who can write the folder; or run without --precompiled",
        )


def _refuse_passes(options: RunOptions, candidates: list[str]) -> None:
    # Passes ran when the step was made, and none runs again when it is read.
    given = {"--extra-pass": bool(options.extra_passes), "--dump-graphs": options.dump_graphs}
    if candidates and (found := [name for name, is_given in given.items() if is_given]):
        raise UsageError(
            f"{found[0]} is about passes, and none runs over a precompiled step",
            expected="a step that is traced where it runs",
            found=", ".join(found),
            fix="leave it out, or run the case without --precompiled and with the candidate graph",
        )
