"""Measures a case's sensitivity in a separate process, from a recording of the candidate.

1. The separate process replays a step for all ranks, and checks that the step has the recorded bits.
2. It forks a process per core. Each forked process makes errors in its share of the calls, in random order, until the
   time is up.
3. It does the same in the next training step, for the calls whose errors did not show. With other parameters, these
   errors may show.

An error is followed only to the end of its step. If it affects later steps, it has changed parameters or optimizer
state by then, and these are compared.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bitproof.harness.case import Case
from bitproof.harness.errors import BitproofError, RankError
from bitproof.harness.powers.sensitivity.records import Effort, Sensitivity
from bitproof.harness.processes import framing
from bitproof.harness.processes.forked import Send, fork
from bitproof.harness.processes.process import num_cores
from bitproof.harness.processes.run_in_subprocess import Lost, answer_all, answers_from_subprocess
from bitproof.harness.processes.watching import Watch

if TYPE_CHECKING:
    from bitproof.harness.powers.sensitivity.examine import CallFinding
    from bitproof.harness.powers.sensitivity.measure import Steps
    from bitproof.harness.powers.sensitivity.spread import Fate

_LOOK_SECONDS = 1.0
MARGIN = 300.0
"""Additional seconds for tracing, for replaying steps, and for the last calls."""

FIRST_STEP = 0.8
"""Share of the time that the first step may use. Later steps try calls again whose errors were not seen."""


@dataclass(frozen=True, kw_only=True)
class Sensing:
    """A measurement of a case's sensitivity.

    - `recording`: path of the candidate's recording.
    - `effort`: limits of the measurement.
    - `extra_passes`: graph passes that are added to the case's pipeline.
    - `packing`: None if only records are compared. Otherwise every call is compared, except calls of these nodes, which
      only copy correct values together, for example `cat` into a bucket.
    """

    case: Case
    recording: Path
    effort: Effort = field(default_factory=Effort)
    extra_passes: tuple[str, ...] = ()
    packing: tuple[str, ...] | None = None


def sense_apart(task: Sensing, device: str, log: Path) -> Sensitivity:
    # A replay on the CPU would not have the bits of a GPU's kernels.
    if device != "cpu":
        return Sensitivity(reason=f"steps are replayed on the CPU, and this case ran on {device}")
    timeout = float("inf") if task.effort.seconds is None else task.effort.seconds + MARGIN
    found = answers_from_subprocess("bitproof.harness.powers.sensitivity.sensing", task, Sensitivity, 1, log, timeout)
    # Closing the generator ends the process.
    with contextlib.closing(found) as answers:
        answer = next(answers)
    return Sensitivity(reason=answer.reason) if isinstance(answer, Lost) else answer


def main() -> None:
    answer_all(Sensing, lambda task: iter([outcome_of(task)]))


def outcome_of(task: Sensing) -> Sensitivity:
    """Measure a case. If this is impossible, the result has only the field `reason`."""
    from bitproof.harness.capture.recording_files import read_recording
    from bitproof.harness.graph.graph_options import GraphOptions
    from bitproof.harness.machine.determinism import set_determinism
    from bitproof.harness.powers.sensitivity.measure import Steps, why_not

    began = time.monotonic()
    if (reason := why_not(task.case)) is not None:
        return Sensitivity(reason=reason)
    # As on ranks: the replay must have their bits.
    set_determinism(task.case.seed)
    try:
        recording = read_recording(task.recording)
        steps = Steps.of(task.case, GraphOptions(extra_passes=task.extra_passes))
        steps.advance(recording)
        search = _Search(task, steps, began)
        while search.examine() and steps.step + 1 < task.case.steps:
            steps.advance(recording)
    except BitproofError as error:
        return Sensitivity(reason=str(error))
    return replace(search.outcome(), seconds=round(time.monotonic() - began, 3))


class _Search:
    """The calls of a case to examine, and the findings so far, over several steps."""

    def __init__(self, task: Sensing, steps: Steps, began: float) -> None:
        self._task = task
        self._steps = steps
        self._began = began
        self._order = [call.index for call in steps.program.calls if call.counts]
        random.Random(f"{task.case.seed} calls").shuffle(self._order)
        # The first calls of a shuffled list are a random sample; None keeps all.
        self._order = self._order[: task.effort.sample]
        self._found: dict[int, CallFinding] = {}
        self._at_once: set[int] = set()
        self._processes = num_cores()
        self._num_steps = 0

    def examine(self) -> bool:
        """Examine, in the current step, the calls with unseen errors so far. Return whether another step may help."""
        is_first = not self._found
        pending = [index for index in self._order if is_first or self._is_open(index)]
        deadline = None
        if self._task.effort.seconds is not None:
            deadline = self._began + self._task.effort.seconds * (FIRST_STEP if is_first else 1)
        tried = 0
        for finding in self._examine_in_processes(pending, deadline):
            self._note(finding)
            tried += 1
        # A later step counts only if every open call was tried in it.
        if tried == len(pending) or is_first:
            self._num_steps += 1
        late = deadline is not None and time.monotonic() > self._began + (self._task.effort.seconds or 0)
        return not late and any(map(self._is_open, self._found))

    def _is_open(self, index: int) -> bool:
        found = self._found.get(index)
        return found is not None and (found.shown is None or bool(_unseen_formulas(found)))

    def _note(self, finding: CallFinding) -> None:
        """Combine a call's finding with those of earlier steps.

        The call counts as seen if its error was seen in any step, and as blind if even gross errors showed in no step.
        """
        known = self._found.get(finding.call)
        if known is None:
            # At once: the first element that was changed, in the first step.
            if finding.shown and finding.tries == 1:
                self._at_once.add(finding.call)
            self._found[finding.call] = finding
            return
        self._found[finding.call] = replace(
            known,
            shown=known.shown or finding.shown,
            is_blind=known.is_blind and finding.is_blind,
            # Only formulas that were not seen are tried again, so the newer answer counts.
            neighbours={**known.neighbours, **finding.neighbours},
        )

    def _examine_in_processes(self, pending: Sequence[int], deadline: float | None) -> Iterator[CallFinding]:
        from bitproof.harness.powers.sensitivity.examine import Examiner
        from bitproof.harness.powers.sensitivity.spread import Compared

        seed = f"{self._task.case.seed} {self._steps.step}"
        program, ranks, packing = self._steps.program, self._steps.ranks, self._task.packing
        compared = None if packing is None else Compared.of(program, ranks, packing)
        examiner = Examiner(program, ranks, seed, isolated, compared)

        def share(first: int) -> Iterator[CallFinding]:
            # The calls are shuffled, so those that a process reaches before the deadline are a random sample.
            for index in pending[first :: self._processes]:
                if deadline is not None and time.monotonic() > deadline:
                    return
                known = self._found.get(index)
                formulas = None if known is None else _unseen_formulas(known)
                may_be_blind = known is None or known.is_blind
                needs_ulp = known is None or known.shown is None
                yield examiner.examine(index, may_be_blind=may_be_blind, formulas=formulas, needs_ulp=needs_ulp)

        yield from _forked([functools.partial(share, first) for first in range(self._processes)])

    def outcome(self) -> Sensitivity:
        from bitproof.harness.powers.sensitivity.summary import summed_up

        found = summed_up(self._steps.program, self._found, self._at_once)
        return replace(
            found,
            steps=self._num_steps,
            ranks=self._task.case.parallelism.world_size,
            processes=self._processes,
        )


def _unseen_formulas(found: CallFinding) -> list[str]:
    return [name for name, answer in found.neighbours.items() if answer != "seen"]


def _forked(shares: Sequence[Callable[[], Iterator[CallFinding]]]) -> Iterator[CallFinding]:
    from bitproof.harness.powers.sensitivity.examine import CallFinding

    def live(share: Callable[[], Iterator[CallFinding]], send: Send) -> None:
        for finding in share():
            send(finding)

    # Forked, not started: children share the step's values.
    children = [fork(functools.partial(live, share)) for share in shares]
    try:
        with Watch(children) as watch:
            while not watch.is_over:
                for _, line in watch.look(_LOOK_SECONDS):
                    yield framing.read(line, CallFinding)
                for child in children:
                    if child.status:
                        raise RankError(
                            "a process that follows errors through a step failed",
                            found=f"exit status {child.status}",
                            fix="see the log for what it said",
                        )
    finally:
        for child in children:
            child.kill()


def isolated(run: Callable[[], Fate]) -> Fate:
    """Call `run`, which follows an error, in a forked process, because wrong indices may crash a kernel.

    A crash has the result FAILURE, like a call that raises an error: a real run would notice it, too.
    """
    from bitproof.harness.powers.sensitivity.spread import FAILURE, Fate

    def live(send: Send) -> None:
        with contextlib.suppress(BaseException):  # a crash sends nothing
            send(run())

    child = fork(live)
    try:
        line = child.inlet.wait(None)
    finally:
        child.kill()
    fate: Fate = framing.read(line, Fate) if line else Fate(FAILURE)
    return fate
