"""Proves every case before any rank starts, in a separate process.

If this process dies or exceeds the time limit, the remaining cases are NOT TRIED, but they still run. A separate
process is needed: the command line's process must not import torch, and the process that starts the ranks must not
trace.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.powers.proofs.records import ProofOutcome, ProofVerdict
from bitproof.harness.processes.run_in_subprocess import Lost, answer_all, answers_from_subprocess

MOST_NAMED = 200
"""The maximum number of unproved outputs named in an outcome."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The message to the proving process: the cases, and the user's passes that are added to each candidate's graph."""

    cases: tuple[Case, ...]
    extra_passes: tuple[str, ...] = ()


def preflight_proofs(task: Task, log: Path, timeout: float) -> Generator[ProofOutcome, None, None]:
    """Yield the outcome of a proof for each case of `task`, in order.

    - `log`: the file for the output of the proving process.
    - `timeout`: the seconds for each case. After a time-out, all later cases are NOT TRIED.

    Closing the iterator ends the proving process.
    """
    found = answers_from_subprocess(
        "bitproof.harness.powers.proofs.preflight", task, ProofOutcome, len(task.cases), log, timeout
    )
    # So the proving process also ends if the caller stops early.
    with contextlib.closing(found) as answers:
        for answer in answers:
            if isinstance(answer, Lost):
                yield ProofOutcome(verdict=ProofVerdict.NOT_TRIED, reason=answer.reason)
            else:
                yield answer


def main() -> None:
    # This is the proving process, started as `python -m ...preflight PIPE`.
    answer_all(Task, lambda task: (outcome_of(case, task.extra_passes) for case in task.cases))


def outcome_of(case: Case, extra_passes: Sequence[str]) -> ProofOutcome:
    # Imported here, since the parent imports this module and must not import torch.
    from bitproof.harness.errors import BitproofError
    from bitproof.harness.graph.graph_options import GraphOptions
    from bitproof.harness.powers.proofs.prover.answers import NOT_PROVED, PROVED, REFUSED
    from bitproof.harness.powers.proofs.prover.certify import assumed
    from bitproof.harness.powers.proofs.prover.prove import prove_case

    began = time.perf_counter()
    try:
        # To save time, outputs are not computed on random values here: the run that follows compares real ones.
        found = prove_case(case, GraphOptions(extra_passes=tuple(extra_passes)), evaluate=False)
    except BitproofError as error:
        return ProofOutcome(verdict=ProofVerdict.REFUSED, reason=str(error), seconds=time.perf_counter() - began)
    seconds = round(time.perf_counter() - began, 3)
    # Not tried, or refused as a whole: there are no outputs to count.
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
        assumptions=[*assumed(found.graphs, found.proof.table.used())],
        seconds=seconds,
        otherwise=len(found.proof.laid_out_otherwise),
        laid_out_otherwise=found.proof.laid_out_otherwise[:MOST_NAMED],
    )
