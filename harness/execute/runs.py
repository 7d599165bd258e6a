"""Have the ranks of one run forked: by this process, or where they need a program by the stage that makes it.

Ranks forked here descend from a process that never traced and never loaded a user's code. A stage is kept for the
case's other runs of the same program. It begins while ranks of the run before still take their steps: a graph does not
depend on when it is made, and tracing keeps one core busy. Where a user's pass took part in it, every run has a stage
of its own, made when its turn comes, so that no control and no replay inherits what the pass did elsewhere than in the
graph.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from harness.disturb.faults import parse_fault
from harness.errors import UsageError
from harness.execute.accounts import End
from harness.execute.process import num_cores
from harness.execute.ranks import Ranks
from harness.execute.requests import AnyRequest, RunRequest, SeatedRunRequest, Seats
from harness.execute.stage import Place, Send, Stage
from harness.execute.worker import Job, needs_program, options_of_rank, prepare_program, struck
from harness.machine.determinism import set_determinism
from harness.options import OnEvent
from harness.records import Event

if TYPE_CHECKING:
    from harness.systems.graph import GraphProgram


class Runner:
    """Runs what is requested, and keeps the last stage. `hangup` is a descriptor that hangs up when nobody waits."""

    def __init__(self, send: OnEvent, hangup: int | None = None) -> None:
        self._send = send
        self._hangup = hangup
        self._stage: Stage | None = None
        self._staged: RunRequest | None = None
        self._is_ahead = False

    def run(self, request: RunRequest, seats: Seats) -> End:
        """Run what is requested on the ranks that have seats here.

        Raises what goes wrong before ranks start; how they end is the answer.
        """
        in_stage = _is_staged(request)
        self._leave(request, in_stage)
        if not in_stage:
            self._begin_later(request, seats)
            return run_ranks(request, seats, self._send, self._hangup)
        stage = self._stage or self._begin(request)
        self._is_ahead = False
        try:
            end = stage.ask(
                SeatedRunRequest(run=request, seats=seats),
                self._send,
                what=f"the program of {request.system}",
                timeout=request.timeout,
                case_timeout=request.case_timeout,
                hangup=self._hangup,
            )
        except UsageError:  # the call was wrong, and the program is as it was
            raise
        except BaseException:
            self.close()
            raise
        if request.runs_user_code:
            self.close()
        return end

    def close(self) -> None:
        """End the stage, if there is one, and free what it holds."""
        if self._stage is not None and self._is_ahead:  # it is busy with what nobody wants any more
            self._stage.kill()
        elif self._stage is not None:
            self._stage.close()
        self._stage = self._staged = None

    def _begin(self, request: RunRequest) -> Stage:
        maker = Maker()
        self._stage = Stage(maker.answer, log=request.trace_log, end=maker.end)
        self._staged = request
        return self._stage

    def _begin_later(self, request: RunRequest, seats: Seats) -> None:
        """Have the next run's program made from now on, where a core may be free and none but our own code makes it."""
        later = request.later
        if later is None or self._stage is not None or not _is_staged(later) or later.runs_user_code or num_cores() < 2:
            return
        self._is_ahead = True
        self._begin(later).tell(SeatedRunRequest(run=later, seats=seats, is_ahead=True))

    def _leave(self, request: RunRequest, in_stage: bool) -> None:
        """End the stage of another case or, when one is needed, of another program."""
        last = self._staged
        if last is not None and (last.case != request.case or (in_stage and last.program != request.program)):
            self.close()


def _is_staged(request: RunRequest) -> bool:
    """Whether a stage makes the program. On CUDA every rank does: a context would not survive a fork."""
    return needs_program(request.system) and request.placement.device != "cuda"


class Maker:
    """What a stage does: make the program at the first request, then run it at each."""

    def __init__(self) -> None:
        self._program: GraphProgram | None = None
        self._refusal: BaseException | None = None

    def answer(self, request: AnyRequest, send: Send, hangup: int) -> End | None:
        """The end of one run; nothing where the program is to be made ahead of it."""
        assert isinstance(request, SeatedRunRequest), "a runner asks for nothing else"
        run, seats = request.run, request.seats
        if request.is_ahead:
            try:
                self._program = self._make(run, seats, send)
            except BaseException as error:  # whoever asks for the run is told
                self._refusal = error
            return None
        if self._refusal is not None:
            raise self._refusal
        began = time.monotonic()
        if self._program is None:
            self._program = self._make(run, seats, send)
        program = struck(self._program, parse_fault(run.inject) if run.inject else None, run.case)
        send(Place(""))
        return run_ranks(run, seats, send, hangup, program, time.monotonic() - began)

    def end(self) -> None:
        """Let go of the program."""
        self._program = None

    def _make(self, request: RunRequest, seats: Seats, send: Send) -> GraphProgram:
        import torch

        send(Event(event="prepare"))
        set_determinism(request.case.seed)
        options = options_of_rank(request.graph_options, seats.ranks[0])
        program: GraphProgram = prepare_program(
            request.case, torch.device("cpu"), options, lambda place: send(Place(place))
        )
        send(Event(event="prepared"))
        return program


def run_ranks(
    request: RunRequest,
    seats: Seats,
    send: OnEvent,
    hangup: int | None,
    program: GraphProgram | None = None,
    prepare_seconds: float = 0.0,
) -> End:
    """Fork the ranks that have seats here from this very process, and watch them to their end."""
    job = Job(
        case=request.case,
        system=request.system,
        placement=request.placement,
        part=seats.part,
        timeout=max(0.0, request.timeout - prepare_seconds),
        case_timeout=request.case_timeout,
        collective_timeout=request.timeout + 60,
        fault=parse_fault(request.inject) if request.inject else None,
        replay=request.replay,
        program=program,
        graph_options=request.graph_options,
        local_rank=seats.local_rank,
        stress=request.stress,
        names=request.names,
        values=request.values_to_keep,
        is_first=request.is_first,
        profile=request.profile,
    )
    send(Event(event="start"))
    end = Ranks(job, seats, request.log_of, send).run(hangup)
    return dataclasses.replace(end, prepare_seconds=prepare_seconds)
