"""Find all calls that read a wrong input in the same way as the blamed call.

Example: a pipeline's backward of micro-batch 2 reads the activations that micro-batch 1 kept. Each call that reads
such an activation is wrong by itself, and together they are a single cause:

    reference    silu x2 -> a2 (forward, 2)    mul g a2 (backward, 2)    mm h a2 (backward, 2)
    candidate    silu x2 -> a2 (forward, 2)    mul g a1 (backward, 2)    mm h a1 (backward, 2)

Two ways are known: another micro-batch's value of the same call, and a value left from before the step, which the
reference never has, where the reference reads a value that the step computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.calls import producer_of
from bitproof.harness.localize.logs.candidate_log import CandidateLog

BEFORE_THE_STEP, ANOTHER_MICRO_BATCH = "before the step", "another micro-batch"


class Misread(NamedTuple):
    """An input that differs from the matching call's: the call's rank, its index in the candidate's log and
    its match's in the reference's, and the position of the input in either.
    """

    rank: int
    mine: int
    theirs: int
    position: int
    there: int


def ways_of(culprit: Culprit, logs: Sequence[CandidateLog]) -> set[str]:
    """Return how the blamed call misreads its inputs; empty if it reads the right ones, or others in no known way."""
    if culprit.candidate is None or culprit.reference is None or culprit.how not in ("reads", "inherits"):
        return set()
    own = _misread(logs[culprit.rank], culprit.rank, culprit.candidate, culprit.reference)
    return {way for way, _ in own}


def misreads_like(culprit: Culprit, logs: Sequence[CandidateLog]) -> Iterator[Misread]:
    """Yield each input, on any rank, that is read in a way in which the blamed call reads one of its inputs.

    The readers of a view are misread instead of the view itself, so that each value is exchanged once.
    """
    ways = ways_of(culprit, logs)
    for rank, log in enumerate(logs) if ways else ():
        for mine, call in enumerate(log.log):
            if not call.view and (theirs := log.matching_call(mine)) is not None:
                yield from (read for way, read in _misread(log, rank, mine, theirs) if way in ways)


def _misread(log: CandidateLog, rank: int, mine: int, theirs: int) -> Iterator[tuple[str, Misread]]:
    """Yield the inputs of a call that are misread, each after how it is."""
    for position, there in log.differing_inputs(mine, theirs):
        if position is not None and there is not None:
            read = Misread(rank, mine, theirs, position, there)
            if way := _way(log, read):
                yield way, read


def _way(log: CandidateLog, read: Misread) -> str | None:
    """Return how an input is misread; None if it is wrong by itself, or read in no known way."""
    value = log.log[read.mine].inputs[read.position]
    maker = producer_of(log.log, log.input_producers, read.mine, read.position)
    due = producer_of(log.reference.log, log.reference.input_producers, read.theirs, read.there)
    if due is None:
        return None
    # A view without producers is one of a value from before the step. If the reference has the value as well, the call
    # that computes with it there may be missing, which is another defect.
    if maker is None or (log.log[maker].view and not log.producers(maker)):
        return BEFORE_THE_STEP if value not in log.reference.values else None
    # The candidate's call may have no place, so its match in the reference counts.
    if (other := log.matching_call(maker)) is None or value not in log.reference.values:
        return None
    call, right = log.reference.log[other], log.reference.log[due]
    is_of_one_place = (call.operator, call.place) == (right.operator, right.place)
    return ANOTHER_MICRO_BATCH if is_of_one_place and call.micro_batch != right.micro_batch else None
