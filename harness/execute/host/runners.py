"""Fork the ranks of a run: from the host process or, for a system with a graph, from a process that has the graph.

A graph needs two more processes, because the host process itself must never trace and never run a user's code:

1. The stage, forked from the host process, traces a step. It is kept as long as runs need the same step.
2. The finishing process, forked from the stage, runs the graph passes and forks the ranks. With a user's pass, each run
   gets a new one, so that no run inherits a side effect of that pass, such as a changed global.

Tracing starts early, while the previous run's ranks still take their steps.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bitproof.harness.case import COMPILED
from bitproof.harness.errors import MachineError, RankError, UsageError
from bitproof.harness.execute.host.job import Job
from bitproof.harness.execute.host.kernels import make_kernels
from bitproof.harness.execute.host.models import check_model
from bitproof.harness.execute.host.programs import needs_program, options_of_rank, read_precompiled, with_fault
from bitproof.harness.execute.host.rank_system import checks_mixing
from bitproof.harness.execute.host.ranks import Ranks
from bitproof.harness.execute.host.stage import Send, Stage, StagePlace
from bitproof.harness.execute.preloaded import preload_watched
from bitproof.harness.execute.requests import AnyRequest, LocalRunRequest, RankSlots, RunRequest, StepFolder
from bitproof.harness.execute.status_messages import End
from bitproof.harness.machine.capacity import free_memory
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.machine.gpus import has_started_driver
from bitproof.harness.options import OnEvent
from bitproof.harness.processes.process import num_cores
from bitproof.harness.records import Event
from bitproof.harness.runtime.sources import Installation
from bitproof.harness.systems.graph_key import GraphCache, graph_cache_of, step_part
from bitproof.harness.systems.registry import BUILT_IN, folder_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from bitproof.harness.case import Case
    from bitproof.harness.disturb.kinds import Fault
    from bitproof.harness.graph.graph_options import GraphOptions
    from bitproof.harness.systems.graph import TracedStep
    from bitproof.harness.systems.graph_program import GraphProgram


class Runner:
    """Runs requests. Keeps the last stage (the process that traced a step) for later runs of the same step.

    `hangup` is a file descriptor that hangs up when the process that sent the requests stops waiting.
    """

    def __init__(self, send: OnEvent, hangup: int | None = None, fingerprint: Installation | None = None) -> None:
        self._send = send
        self._fingerprint = fingerprint
        self._hangup = hangup
        self._stage: Stage | None = None
        self._staged_request: RunRequest | None = None
        self._is_prefetch = False
        self._preloaders: dict[tuple[tuple[str, ...], Path | None], Stage] = {}

    def run(self, request: RunRequest, rank_slots: RankSlots) -> End:
        """Run a request on the ranks of `rank_slots`, and return how the run ended, even if a rank failed.

        Raises errors that occur before the ranks start.
        """
        in_stage = _is_staged(request)
        self._close_other_stage(request)
        if not in_stage:
            make_kernels(request)  # before a stage is forked, so that its ranks inherit the kernels too
            self._begin_later(request, rank_slots)
            if request.case.preload:
                return self._run_preloaded(request, rank_slots)
            graph_cache = graph_cache_of_run(request, self._fingerprint)
            return run_ranks(request, rank_slots, self._send, self._hangup, graph_cache=graph_cache)
        # After any error but a wrong option, the stage may be dead or stuck, so the next run gets a new stage.
        stage = self._stage or self._begin(request)
        self._is_prefetch = False
        try:
            return self._ask(stage, request, rank_slots, f"the program of {request.system}")
        except UsageError:  # a wrong option, and the program is intact
            raise
        except BaseException:
            self._close_stage()
            raise

    def close(self) -> None:
        self._close_stage()
        self._close_preloaders()

    def _ask(self, stage: Stage, request: RunRequest, rank_slots: RankSlots, what: str) -> End:
        return stage.ask(
            LocalRunRequest(run=request, rank_slots=rank_slots, asked_at=time.monotonic()),
            self._send,
            what=what,
            timeout=request.timeout,
            case_timeout=request.case_timeout,
            hangup=self._hangup,
        )

    def _run_preloaded(self, request: RunRequest, rank_slots: RankSlots) -> End:
        # That process searches for modules in the same folders as the system, beginning with the system's own folder.
        # So there is such a process for each system's folder.
        modules, folder = request.case.preload, folder_of(request.system, request.case)
        # Keep only processes with the modules of this case. There may be several of them, for several folders.
        if any(preloaded != modules for preloaded, _ in self._preloaders):
            self._close_preloaders()
        if (modules, folder) not in self._preloaders:
            preloader = Preloader(folder)
            self._preloaders[modules, folder] = Stage(preloader.answer, log=request.trace_log)
        try:
            stage = self._preloaders[modules, folder]
            return self._ask(stage, request, rank_slots, f"the preloaded modules of {request.system}")
        except BaseException:
            self._preloaders.pop((modules, folder)).close()
            raise

    def _close_preloaders(self) -> None:
        while self._preloaders:
            self._preloaders.popitem()[1].close()

    def _close_stage(self) -> None:
        if self._stage is not None and self._is_prefetch:  # it works on a cancelled request
            self._stage.kill()
        elif self._stage is not None:
            self._stage.close()
        self._stage = self._staged_request = None

    def _begin(self, request: RunRequest) -> Stage:
        tracer = Tracer(self._fingerprint)
        graph_cache = graph_cache_of_run(request, self._fingerprint)
        if request.precompiled is None and not (graph_cache and graph_cache.has_graph()):
            from bitproof.harness.torch_compat import import_tracing

            import_tracing()  # in this process, so that the stages of later cases inherit it
        self._stage = Stage(tracer.answer, log=request.trace_log, end=tracer.end)
        self._staged_request = request
        return self._stage

    def _begin_later(self, request: RunRequest, rank_slots: RankSlots) -> None:
        later = request.later
        if later is None or self._stage is not None or not _is_staged(later) or num_cores() < 2:
            return
        self._is_prefetch = True
        self._begin(later).send(LocalRunRequest(run=later, rank_slots=rank_slots, is_prefetch=True))

    def _close_other_stage(self, request: RunRequest) -> None:
        # The request for which the stage was made. Another request may use the stage if its step is traced alike.
        last = self._staged_request
        if last is None:
            return
        is_other_system = needs_program(request.system) and request.system != last.system
        is_other_system |= request.precompiled != last.precompiled and needs_program(request.system)
        preloads_other = last.case.preload != request.case.preload
        if is_other_system or preloads_other or step_part(last.case) != step_part(request.case):
            self._close_stage()


def _is_staged(request: RunRequest) -> bool:
    # On CUDA every rank makes its own graph, as a CUDA context does not survive a fork.
    return needs_program(request.system) and request.placement.device != "cuda"


class Preloader:
    """Answers requests in a forked process that imports the case's `preload` modules.

    The first request imports these modules. Every request forks the ranks of a run.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._has_preloaded = False

    def answer(self, request: AnyRequest, send: Send, hangup: int) -> End:
        assert isinstance(request, LocalRunRequest), "a runner asks for nothing else"
        began, run = time.monotonic(), request.run
        if not self._has_preloaded:
            send(StagePlace(f"preloading {', '.join(run.case.preload)}"))
            preload_watched(run.case.preload, self._folder)
            self._has_preloaded = True
            # Ranks that are forked from here need not look at the imports when they collect garbage.
            gc.freeze()
        send(StagePlace(""))
        return run_ranks(run, request.rank_slots, send, hangup, prepare_seconds=time.monotonic() - began)


class Tracer:
    """Answers run requests in a stage: the first request traces the step.

    For each graph, the stage forks a further process, which runs the passes and forks the ranks. Later runs of the
    graph reuse this process, unless it ran a user's pass.
    """

    def __init__(self, fingerprint: Installation | None = None) -> None:
        self._fingerprint = fingerprint
        self._traced: TracedStep | None = None
        self._prefetch_error: BaseException | None = None
        self._finishing: Stage | None = None
        self._program = ""

    def answer(self, request: AnyRequest, send: Send, hangup: int) -> End | None:
        """Run the requested ranks, and return how the run ended. For a prefetch, only make the graph, and return
        None."""
        assert isinstance(request, LocalRunRequest), "a runner asks for nothing else"
        if request.is_prefetch:
            try:
                self._begin_prefetch(request, send)
            except BaseException as error:  # the caller of the run gets it
                self._prefetch_error = error
            return None
        # The prefetch failed, and this is the first request that waits for an answer.
        if self._prefetch_error is not None:
            raise self._prefetch_error
        run = request.run
        finishing = self._stage_for(run, send)
        now = time.monotonic()
        # Waiting for a prefetch, and tracing, count as time of the run.
        spent = now - (request.asked_at or now)
        send(StagePlace(""))  # the finishing process is watched from here
        asked = replace(request, run=replace(run, timeout=max(0.0, run.timeout - spent)), asked_at=now)
        try:
            end = finishing.ask(
                asked,
                send,
                what=f"the program of {run.system}",
                timeout=asked.run.timeout,
                case_timeout=run.case_timeout,
                hangup=hangup,
            )
        except UsageError:  # a wrong option, and the program is intact
            raise
        except RankError:  # it hangs or has died: nothing is left to wait for
            finishing.kill()
            self._finishing = None
            raise
        except BaseException:
            self._close_finishing()
            raise
        # A user's pass may have side effects in the process, and the next run must not see them.
        if run.runs_user_code:
            self._close_finishing()
        return replace(end, prepare_seconds=end.prepare_seconds + spent)

    def end(self) -> None:
        self._close_finishing()

    def _begin_prefetch(self, request: LocalRunRequest, send: Send) -> None:
        if request.run.runs_user_code:  # no user's pass runs ahead of its run
            self._trace(request.run, send)
        else:
            self._stage_for(request.run, send).send(request)

    def _stage_for(self, run: RunRequest, send: Send) -> Stage:
        # A finishing process has run its passes over the trace, which modifies the trace: another program needs another
        # process.
        if self._finishing is None or self._program != run.program:
            self._close_finishing()
            graph_cache = graph_cache_of_run(run, self._fingerprint)
            # A graph that is read, from the cache or from a precompiled step, needs no trace.
            program = _read_cached(graph_cache) if run.precompiled is None else _read_precompiled(run, run.precompiled)
            if program is None:
                self._trace(run, send)
            # A fork, as the trace in this process serves all graphs of the step, and passes would modify it.
            finisher = Finisher(self._traced, program, graph_cache)
            self._finishing = Stage(finisher.answer, log=run.trace_log, end=finisher.end, adds_to_log=True)
            self._program = run.program
        return self._finishing

    def _trace(self, run: RunRequest, send: Send) -> None:
        if self._traced is None:
            send(Event(event="prepare"))
            if run.case.preload:
                preload_watched(run.case.preload)
            set_determinism(run.case.seed)
            self._traced = trace_step(run.case, run.system, lambda place: send(StagePlace(place)))
            gc.freeze()

    def _close_finishing(self) -> None:
        if self._finishing is not None:
            self._finishing.close()
            self._finishing = None


class Finisher:
    """Answers requests in a fork of a stage: the first request runs the passes, and each request forks ranks."""

    def __init__(self, traced: TracedStep | None, program: GraphProgram | None, graph_cache: GraphCache | None) -> None:
        self._traced = traced
        self._program = program
        self._graph_cache = graph_cache
        self._prefetch_error: BaseException | None = None

    def answer(self, request: AnyRequest, send: Send, hangup: int) -> End | None:
        """Run the requested ranks, and return how the run ended. For a prefetch, only make the graph, and return
        None."""
        assert isinstance(request, LocalRunRequest), "a stage asks for nothing else"
        run, rank_slots = request.run, request.rank_slots
        if request.is_prefetch:
            try:
                self._program = self._finished_program(run, rank_slots, send)
            except BaseException as error:  # the caller of the run gets it
                self._prefetch_error = error
            return None
        if self._prefetch_error is not None:
            raise self._prefetch_error
        began = time.monotonic()
        self._program = self._finished_program(run, rank_slots, send)
        program = with_fault(self._program, run.fault, run.case)
        _find_races(program, run.case)
        send(StagePlace(""))
        return run_ranks(run, rank_slots, send, hangup, program, time.monotonic() - began)

    def end(self) -> None:
        self._program = None

    def _finished_program(self, run: RunRequest, rank_slots: RankSlots, send: Send) -> GraphProgram:
        # Passes modify the trace, so they run once, and later runs of the graph share the result.
        if self._program is not None:
            return self._program
        assert self._traced is not None, "a stage traces where it read no program"
        set_determinism(run.case.seed)
        options = options_of_rank(run.graph_options, rank_slots.ranks[0])
        program = finish_program(self._traced, run.case, options, lambda place: send(StagePlace(place)))
        if self._graph_cache is not None:
            from bitproof.harness.systems.cached_graph import keep_program

            keep_program(self._graph_cache, program, run.case)
        send(Event(event="prepared"))
        return program


def trace_step(case: Case, system: str, enter: Callable[[str], None]) -> TracedStep:
    """Trace the case's training step for a system, before any pass.

    Determinism switches must be set before this call.
    """
    import torch

    from bitproof.harness.systems.graph import trace

    return trace(case, torch.device("cpu"), enter, system)


def finish_program(traced: TracedStep, case: Case, options: GraphOptions, enter: Callable[[str], None]) -> GraphProgram:
    import torch

    from bitproof.harness.systems.graph import finish

    return finish(traced, case, torch.device("cpu"), options, enter)


def _read_cached(graph_cache: GraphCache | None) -> GraphProgram | None:
    if graph_cache is None:
        return None
    from bitproof.harness.systems.cached_graph import read_program

    return read_program(graph_cache)


def _read_precompiled(run: RunRequest, step: StepFolder) -> GraphProgram:
    import torch

    set_determinism(run.case.seed)
    found: GraphProgram = read_precompiled(run.case, torch.device("cpu"), step, run.system)
    return found


def graph_cache_of_run(run: RunRequest, fingerprint: Installation | None) -> GraphCache | None:
    """Return the cache for the graph of a run's case and for results of checks.

    Return None if the run must not use it: with user code, a precompiled step, a graph dump, or a fault that edits the
    graph.
    """
    is_ours = not run.runs_user_code and not run.case.preload and run.system in BUILT_IN
    if run.precompiled is not None:
        return None
    # A dump shows the graph after every pass, and no pass runs if a kept graph is read.
    is_read = is_ours and run.dump_dir is None and not _edits_the_graph(run.fault)
    device = run.placement.device
    return graph_cache_of(run.case, run.options.kept_graphs, fingerprint, run.system, device) if is_read else None


def _edits_the_graph(fault: Fault | None) -> bool:
    # Such a fault needs shapes and dtypes to find its target, and cached graphs lack these.
    return fault is not None and fault.row is not None and fault.row.edit is not None


def _import_for_ranks(run: RunRequest, program: GraphProgram | None, graph_cache: GraphCache | None) -> None:
    """Import the modules that this run's ranks would each import. Ranks that are forked later inherit them, too."""
    if run.system == COMPILED or (needs_program(run.system) and program is None):
        from bitproof.harness.torch_compat import import_tracing

        import_tracing()
    if run.system == COMPILED:
        import bitproof.harness.systems.compiled
    if checks_mixing(run, graph_cache):
        import bitproof.harness.graph.analysis.mixing
    if run.replay is not None:
        import bitproof.harness.localize.logs.call_log  # noqa: F401


def run_ranks(
    request: RunRequest,
    rank_slots: RankSlots,
    send: OnEvent,
    hangup: int | None,
    program: GraphProgram | None = None,
    prepare_seconds: float = 0.0,
    graph_cache: GraphCache | None = None,
) -> End:
    """Fork the ranks in `rank_slots`, watch them until all have ended, and return how they ended.

    Raises CaseError if the model cannot be split. Raises MachineError if the model is too large, or if this process has
    initialized CUDA.
    """
    on_cpu = request.placement.device == "cpu"
    if not on_cpu and has_started_driver():
        raise MachineError(
            "the process that ranks are forked from has started CUDA's driver, so none of them could use a GPU",
            expected="code that asks nothing of CUDA before ranks are forked",
            fix="leave modules that ask CUDA out of `preload`, and out of files that are read before ranks start",
        )
    check_model(request.case, request.system, len(rank_slots.ranks), free_memory() if on_cpu else None)
    # Making the program has used a part of the run's time.
    run = replace(request, timeout=max(0.0, request.timeout - prepare_seconds))
    job = Job(run=run, rank_slots=rank_slots, program=program, graph_cache=graph_cache)
    _import_for_ranks(run, program, graph_cache)
    send(Event(event="start"))
    end = Ranks(job, request.log_of, send).run(hangup)
    return replace(end, prepare_seconds=prepare_seconds)


def _find_races(program: object, case: Case) -> None:
    from bitproof.harness.systems.graph_program import GraphProgram

    if isinstance(program, GraphProgram):
        # The result is stored in the program, so no rank repeats the search.
        program.hazards(case)
