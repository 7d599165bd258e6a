"""Proofs ahead of a run: before any rank starts, a process of its own proves every case, and tells what came of it.

The command line's process loads no torch, and the host never traces; so this one does, once for all cases. It is handed
them on its standard input and answers a line a case on a pipe; what it prints goes to a log. A proof that fails, or a
process that dies, makes a case NOT TRIED and keeps nothing from running. A user's passes, and a hang in one of them,
have a case's time as under a run.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.case import Case
from harness.execute import wire
from harness.records import ProofOutcome, ProofVerdict

MOST_NAMED = 200
"""How many outputs that are not proved an outcome names."""

_START = str(Path(__file__).parents[1] / "program" / "start.py")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be proved: cases, with a user's passes in each candidate's graph."""

    cases: tuple[Case, ...]
    extra_passes: tuple[str, ...] = ()


def prove_ahead(task: Task, log: Path, timeout: float) -> Iterator[ProofOutcome]:
    """An outcome for each case, in order, each within `timeout` seconds; later ones are not tried after one that is
    not in time. Closing the iterator ends the process."""
    reader, writer = os.pipe()
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", _START, "harness.execute.ahead", str(writer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,  # an interrupt reaches us alone, and we end it
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        with contextlib.suppress(BrokenPipeError):
            _hand_over(process, task)
        received, lost = b"", None
        for _ in task.cases:
            deadline = time.monotonic() + timeout
            while lost is None and b"\n" not in received:
                readable, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
                content = os.read(reader, 1 << 16) if readable else b""
                if not content:
                    lost = "its process ended" if readable else f"it took longer than {timeout:g} s"
                received += content
            if lost is not None:
                yield ProofOutcome(verdict=ProofVerdict.NOT_TRIED, reason=f"{lost}: see logs/{log.name}")
                continue
            line, _, received = received.partition(b"\n")
            yield wire.read(line, ProofOutcome)
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def _hand_over(process: subprocess.Popen[bytes], task: Task) -> None:
    assert process.stdin is not None
    with process.stdin as stream:
        stream.write(wire.write(task))


def main() -> None:
    """The process that proves: `harness.execute.ahead PIPE`."""
    with os.fdopen(int(sys.argv[1]), "wb", buffering=0) as answers:
        task: Task = wire.read(sys.stdin.buffer.readline(), Task)
        for case in task.cases:
            answers.write(wire.write(outcome_of(case, task.extra_passes)))


def outcome_of(case: Case, extra_passes: Sequence[str]) -> ProofOutcome:
    """What a proof says of a case. Terms are not computed: the run that follows compares bits."""
    from harness.errors import BitproofError
    from harness.graph.options import GraphOptions
    from harness.prove.answers import NOT_PROVED, PROVED, REFUSED
    from harness.prove.assumptions import assumptions_of
    from harness.prove.prove import prove_case

    began = time.perf_counter()
    try:
        found = prove_case(case, GraphOptions(extra_passes=tuple(extra_passes)), evaluate=False)
    except BitproofError as error:
        return ProofOutcome(verdict=ProofVerdict.REFUSED, reason=str(error), seconds=time.perf_counter() - began)
    seconds = round(time.perf_counter() - began, 3)
    if found.proof is None or found.graphs is None:
        return ProofOutcome(verdict=ProofVerdict(found.verdict), reason=found.reason, seconds=seconds)
    others = [answer for answer in found.proof.answers if answer.verdict != PROVED]
    first = next((answer.finding.lines() for answer in others if answer.finding), [])
    return ProofOutcome(
        verdict=ProofVerdict(found.verdict),
        proved=found.proof.count(PROVED),
        not_proved=found.proof.count(NOT_PROVED),
        refused=found.proof.count(REFUSED),
        reason=next((f"{answer.output}: {answer.reason}" for answer in others if answer.reason), None),
        unproved=[answer.output for answer in others[:MOST_NAMED]],
        first=first,
        assumptions=assumptions_of(found.proof.table, found.graphs),
        seconds=seconds,
    )
