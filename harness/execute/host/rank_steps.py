"""Run a rank's steps in order, each recorded or logged, while faults, stress and monitors are active."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from bitproof.harness.capture.generators import Generators
from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.capture.recording_files import write_part
from bitproof.harness.capture.values import write_values
from bitproof.harness.case import Kind
from bitproof.harness.checks.power_modules import power_module
from bitproof.harness.disturb.injection import Injection
from bitproof.harness.disturb.stress import stressed
from bitproof.harness.execute.host.job import Job
from bitproof.harness.execute.instruments.profile import phase, showing_digests
from bitproof.harness.execute.instruments.stopwatch import Stopwatch, counts_flops
from bitproof.harness.execute.status_messages import Account, StepBegan
from bitproof.harness.localize.logs.replay import RECORD, Replay, StepTrace, name_of_spare, write_archive
from bitproof.harness.records import Key
from bitproof.harness.within_user_code import refusals_raised

if TYPE_CHECKING:
    import torch

    from bitproof.harness.execute.host.rank_system import Observe, System

Send = Callable[[Account], None]
logger = logging.getLogger("bitproof")


class RankSteps:
    """Runs a rank's training steps. `seconds` is their total time, and `send` sends messages to the host process."""

    def __init__(self, job: Job, rank: int, device: torch.device, injector: Injection, send: Send) -> None:
        from bitproof.harness.execute.host.activity_monitor import ActivityMonitor
        from bitproof.reference.parallel.mesh import collectives_in_memory

        run = job.run
        cuts = run.across.cuts if run.across else {}
        record = job.watched.record if job.watched else None
        self.device = device
        self.recorder = Recorder(rank, record, run.values_to_keep, cuts=cuts)
        self.monitor = ActivityMonitor(collectives_in_memory)
        is_counted = counts_flops(run.system, rank)
        self.stopwatch = Stopwatch(self.recorder, device, is_on=job.is_timed, counts=is_counted)
        self.seconds = 0.0
        self._job = job
        self._injector = injector
        self._send = send
        self._trace = StepTrace()
        observe = self.recorder.observe
        observe = injector.hide_from_fault(showing_digests(observe) if run.profile else observe)
        self.across: Any = None
        if run.across is not None:
            in_rank = power_module("two_layouts.in_rank")
            self.across = in_rank.InRank(run.across, rank, lambda: self.recorder.step)
            observe = self.across.sums.noticing(observe)
        # A flipped bit must reach everything that observes the tensor, so flipping is outermost.
        self._observe = injector.flipping(observe)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which faults, stress and monitors are active.

        Enter it before the system is made, and leave it after the last step.
        """
        from bitproof.harness.systems.default_group import lent

        run, rank = self._job.run, self.recorder.rank
        disturbed = stressed(run.options.stress, rank, self.device)
        with (
            refusals_raised(),
            lent(self.device),
            disturbed,
            nullcontext() if self.across is None else self.across.at_work(),
            self._injector.at_work(),
            self.monitor.at_work(),
        ):
            yield

    def take(self, system: System) -> None:
        """Run all steps. If a user's system has a method `take_steps`, that method runs them; otherwise they run one by
        one.
        """
        job, resume = self._job, self._job.run.resume
        generators = Generators()

        @contextmanager
        def taking(step: int) -> Iterator[Observe]:
            with self._step_context(step, system, generators) as shown:
                yield shown

        self.monitor.begin_steps()
        began = time.perf_counter()
        if resume is not None:
            resume.begin(system)
        # A loop of the user's takes all steps by itself. It cannot begin in the middle, so a resumed run takes steps
        # one by one.
        if hasattr(system, "take_steps") and resume is None:
            system.take_steps(job.steps, taking)
        else:
            for step in range(job.first_step, job.steps):
                with taking(step) as shown:
                    system.step(step, shown)
        if resume is not None:
            resume.end(system)
        self.seconds = time.perf_counter() - began
        logger.debug("%d steps in %.3f s, %.3f s of it recording", job.steps, self.seconds, self.recorder.seconds)

    def write(self) -> None:
        job, recorder = self._job, self.recorder
        if job.run.replay is None:
            write_part(job.part_of(recorder.rank), recorder.rows.items())
        if job.watched:
            self._trace.records = recorder.rows
            if recorder.kept is not None:
                self._trace.values[RECORD] = recorder.kept
            write_archive(job.archive_of(recorder.rank), self._trace)
        if job.run.values_to_keep:
            write_values(job.values_of(recorder.rank), recorder.values)

    @contextmanager
    def _step_context(self, step: int, system: System, generators: Generators) -> Iterator[Observe]:
        from bitproof.harness.systems.default_group import as_lent

        recorder = self.recorder
        self._send(StepBegan(step=step))
        recorder.step = step
        self._injector.begin_step(step)
        if self.across is not None:
            self.across.sums.begin_step()
        log = self._job.watched
        with self._logging(log, step, system) if log and log.watches(step) else self._timing(step) as shown:
            yield shown
        # User code may have destroyed the default group, which this code needs. Generators are recorded at the end of a
        # step, when all draws of the step are over.
        with as_lent():
            for name, state in generators.drawn().items():
                if Key(step, "rng", name, recorder.rank) not in recorder.rows:  # a system may record them itself
                    recorder.observe("rng", name, state)
            self.monitor.end_step()

    @contextmanager
    def _timing(self, step: int) -> Iterator[Observe]:
        # The phase of a profile is outermost: it includes the wait for the device at the step's end.
        with phase(f"step {step}"), self.stopwatch.running():
            yield self._observe

    @contextmanager
    def _logging(self, replay: Replay, step: int, system: System) -> Iterator[Observe]:
        from bitproof.harness.localize.logs.call_log import logged
        from bitproof.harness.torch_compat import disable_current_modes

        def observe(kind: Kind, name: str, tensor: torch.Tensor) -> None:
            with disable_current_modes():  # calls of the recorder are not the system's calls
                self.recorder.observe(kind, name, tensor)

        rank = self.recorder.rank
        # `names` maps the sites of calls to the names under which their values are stored.
        names, captured = replay.values_of(rank), getattr(system, "captured", None)
        # A replay may log earlier steps as well, but values and exchanges are those of its last step.
        is_last = step == replay.step
        keep, spare = (names, replay.spare) if is_last else ({}, 0)
        exchanges = [each for each in replay.exchanges if each.site.rank == rank] if is_last else []
        made, stays_whole = getattr(system, "made", system), self.monitor.stays_whole
        with logged(made, keep, captured, stays_whole, not replay.log, spare, rank, exchanges) as log:
            yield self._injector.flipping(observe)
        self._trace.exchanged += [*log.exchanges.made, *log.exchanges.left_out()]
        if replay.log:
            self._trace.add_calls(step, log.calls)
            self._trace.types |= log.types
        self._trace.values |= {names[site]: value for site, value in log.kept.items() if site in names}
        self._trace.spare |= {name_of_spare(site): value for site, value in log.kept.items() if site not in names}
