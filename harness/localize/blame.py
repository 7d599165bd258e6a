"""Find the call to blame for a differing record: follow it back through both logs to the first differing calls.

1. Each call on the way is compared with the matching call of the reference: same operator, module and direction
   (`matching`, `paired_walk`).
2. The earliest call that differs is to blame. Calls of several ranks are ordered by the collectives that join them
   (`joined_logs`).
3. The blamed call is only a candidate for the cause, which `exchange` then verifies.

docs/explanation/causes.md describes this with examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bitproof.harness.localize.argument_differences import (
    argument_differences,
    input_differences,
    list_differences,
    strange_output,
)
from bitproof.harness.localize.chain import Pair, with_chain
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.calls import KERNELS, Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.idle_broadcasts import without_idle_broadcasts
from bitproof.harness.localize.logs.joined_logs import JoinedLogs
from bitproof.harness.localize.logs.reference_log import ReferenceLog
from bitproof.harness.localize.paired_walk import PossibleCause, Walk, ordered

Differing = Mapping[int, Iterable[Pair]]
"""For each rank, the digests of each tensor that differs."""


def find_culprit(
    reference: Sequence[Sequence[Call] | ReferenceLog],
    candidate: Sequence[Sequence[Call]],
    differing: Differing,
    first: tuple[int, Pair] | None = None,
) -> Culprit | None:
    """Return the call to blame for the first tensor for which a call is found; None if there is no such tensor.

    - `reference`, `candidate`: a log for each rank. A `ReferenceLog` is indexed already.
    - `differing`: the tensors to search, in this order.
    - `first`: the tensor to search before these: its rank and its two digests.
    """
    return culprit_in(ready_logs(reference, candidate), differing, first)


def ready_logs(
    reference: Sequence[Sequence[Call] | ReferenceLog], candidate: Sequence[Sequence[Call]]
) -> list[CandidateLog]:
    """Return the candidate's log of each rank, matched with the reference's. Several searches may use the result."""
    # Whether a broadcast is idle depends on all ranks' logs, so logs of only some ranks are left unchanged.
    plain = [log for log in reference if not isinstance(log, ReferenceLog)]
    reference = without_idle_broadcasts(plain) if len(plain) == len(reference) else reference
    # An indexed reference may come from a baseline, and is used as it is.
    candidate = without_idle_broadcasts(candidate)
    known = [log if isinstance(log, ReferenceLog) else ReferenceLog(log) for log in reference]
    return [CandidateLog(calls, ready) for calls, ready in zip(candidate, known, strict=True)]


def culprit_in(
    logs: Sequence[CandidateLog], differing: Differing, first: tuple[int, Pair] | None = None
) -> Culprit | None:
    """Return the call to blame, or None, as `find_culprit` does. `logs` is the result of `ready_logs`."""
    return next(iter(culprits_in(logs, differing, first, max_calls=1)), None)


def culprits_in(
    logs: Sequence[CandidateLog],
    differing: Differing,
    first: tuple[int, Pair] | None = None,
    max_calls: int | None = None,
) -> list[Culprit]:
    """Return the calls that may be to blame for the first tensor that has such calls, the likeliest call first.

    The tensor `first` is searched before those of `differing`. Returns at most `max_calls` calls, all if it is None,
    and an empty list if no tensor has such calls.
    """
    joined, known = JoinedLogs([log.log for log in logs]), JoinedLogs([log.reference.log for log in logs])
    # The record `first` comes first, and is not searched twice.
    records = [(rank, pair) for rank, pairs in differing.items() for pair in pairs]
    for rank, pair in records if first is None else [first, *(record for record in records if record != first)]:
        walk = Walk(logs, joined, known)
        walk.from_record(rank, pair)
        if walk.found:
            # From other ranks' records the same defect may be reached on those ranks, and only there.
            others = Walk(logs, joined, known)
            for record in records:
                others.from_record(*record)
            culprits = [_culprit_of(parting, walk, others.found) for parting in ordered(walk)[:max_calls]]
            return [with_chain(culprit, rank, pair, logs, joined, known) for culprit in culprits]
    return []


def _culprit_of(parting: PossibleCause, walk: Walk, everywhere: Iterable[PossibleCause]) -> Culprit:
    """Return the possible cause `parting`, which a walk found, as a culprit.

    `everywhere` has the possible causes of all differing records. They show on which other ranks the same call is
    wrong.
    """
    rank, mine, due, how = parting
    log = walk.logs[rank]
    # At least one of the two indices is known, so `due or 0` is only for the type checker.
    call = log.reference.log[due or 0] if mine is None else log.log[mine]
    ranks = tuple(sorted({rank} | {other.rank for other in everywhere if _is_same(parting, other, walk)}))
    found = Culprit(
        how=how, call=call, ranks=ranks, candidate=mine, reference=due, at=rank if rank != ranks[0] else None
    )
    if mine is None:
        return replace(found, arguments=list_differences(log, call))
    # A compiled graph is a single entry, so its match and its arguments would say nothing about the
    # wrong call within it.
    if call.operator.startswith(KERNELS):
        return replace(found, how="compiles", reference=None, reading=strange_output(log, call))
    if due is None:
        return _placed(found, walk)
    other = log.reference.log[due]
    # The log knows better how a value without a producer came about: as uninitialized memory, or from outside torch.
    if how in ("reads", "inherits"):
        how = log.untracked_read(mine, other.inputs) or how
    return replace(
        found,
        # Without a tensor input, equal inputs are no evidence that the call computes a wrong value.
        how="draws" if how in ("computes", "reads") and not call.inputs else how,
        arguments=argument_differences(call, other),
        reading=input_differences(log, mine, due) if how == "reads" else "",
    )


def _is_same(first: PossibleCause, second: PossibleCause, walk: Walk) -> bool:
    """Whether two causes are the same defect of the same call, on one rank or on two.

    True if operator, place and defect are equal, and if equally many calls of this operator and place come before each
    of the two.
    """
    if first.how != second.how or (first.candidate is None) != (second.candidate is None):
        return False
    ids = []
    for rank, mine, due, _ in (first, second):
        # Indices of different ranks cannot be compared, so a call is identified by its operator, place and occurrence.
        log, index = (walk.logs[rank], mine) if mine is not None else (walk.logs[rank].reference, due or 0)
        ids.append((log.log[index].operator, log.log[index].place, log.occurrence(index)))
    return ids[0] == ids[1]


def _placed(culprit: Culprit, walk: Walk) -> Culprit:
    """Return `culprit`. If only the candidate makes its call, the call gets the place of the reference's call that it
    replaces.

    If it replaces no call and has no place, it gets the place of the call that reads it: `state["step"] += 1` belongs
    to the update.
    """
    log, site = walk.logs[culprit.rank], (culprit.rank, culprit.candidate or 0)
    due, reader = walk.replaced.get(site), walk.readers.get(site)
    if due is not None:
        other = log.reference.log[due]
        # It replaces the other call only if it computes something else from a common input; otherwise
        # it merely runs nearby.
        if other.operator != culprit.call.operator and set(culprit.call.inputs) & set(other.inputs):
            return replace(culprit, call=culprit.call._replace(place=other.place), instead_of=other.operator)
    known, own = None if reader is None else log.matching_call(reader), culprit.call.place
    if known is not None:
        there = log.reference.log[known].place
        if own.direction is None or (not own.module and there.direction == "update"):
            return replace(culprit, call=culprit.call._replace(place=there))
    return culprit
