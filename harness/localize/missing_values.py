"""Right values that the candidate lacks, or that it has in the wrong tensor (rules 2, 4 and 5 of `blame`)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from bitproof.harness.case import root_of
from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs, Site
from bitproof.harness.localize.logs.packing import CONSTANTS, PACKING, keeps_order, name_of


def blocks_elsewhere(logs: Sequence[CandidateLog]) -> list[frozenset[str]]:
    """For each rank, the blocks that only other ranks run, such as the layers of another pipeline stage."""
    own = [frozenset(_block(call) for call in log.log) for log in logs]
    return [frozenset().union(*own) - blocks for blocks in own]


def _block(call: Call) -> str:
    """A call's layer, such as "layers.3", or its outermost module if it is outside the layers."""
    module = call.place.module or ""
    return root_of("layers.*", module) or module.partition(".")[0]


def first_missing(
    log: CandidateLog, wanted: Iterable[str], before: int | None = None, elsewhere: Container[str] = ()
) -> int | None:
    """The reference's first call, on a path to `wanted`, whose inputs are here and whose output is missing.

    Example: if the candidate skips `silu` in `mm -> silu -> sum`, the wanted sum leads back to `silu`.

    - A value that is only made from call `before` on, in another direction, is missing: backward may divide again.
    - A value that the reference computes in a block of `elsewhere` is not missing: this rank receives it.

    None if nothing is missing.
    """
    made_late = {value for call in log.log[before:] for value in call.outputs} if before is not None else set()
    # Inputs of the step are there at any time.
    there = log.values - made_late
    there |= {value for call in log.log[:before] for value in (*call.inputs, *call.outputs, *call.aliases)}
    late = {(value, call.place.direction) for call in log.log[before:] for value in call.outputs}

    def is_missing(value: str) -> bool:
        index = log.reference.producer(value)
        # An input of the step, even if no call reads it here.
        if index is None:
            return False
        if _block(log.reference.log[index]) in elsewhere:
            return False
        return value not in there and (value, log.reference.log[index].place.direction) not in late

    # Walk back over missing values. A call whose inputs all exist is a candidate; constants come last, as they are
    # usually made for a call that is missing itself.
    pending, seen, found = [*filter(is_missing, wanted)], set(), []
    while pending:
        index = log.reference.producer(pending.pop())
        if index is None or index in seen:
            continue
        seen.add(index)
        earlier = [*filter(is_missing, log.reference.log[index].inputs)]
        pending += earlier
        if not earlier:
            found.append(index)
    return min(found, key=lambda index: (name_of(log.reference.log[index]) in CONSTANTS, index), default=None)


def first_lost(log: CandidateLog, index: int) -> int:
    """The index of the first missing call that computes. The search goes from the missing call `index` to its readers.

    A pack, a constant, or a view of a whole value is only made for its reader, so its reader is the missing call. For
    example, if `zeros` and the `index_add` that reads it are missing, the answer is `index_add`.
    """

    def is_for_its_reader(call: Call) -> bool:
        return keeps_order(call) or (name_of(call) in PACKING | CONSTANTS and not call.view)

    while is_for_its_reader(log.reference.log[index]):
        readers = (i for i in range(index + 1, len(log.reference.log)) if index in log.reference.givers(i))
        lost = (i for i in readers if log.lacks(i) and _makes_fewer(log, log.reference.log[i]))
        if (reader := next(lost, None)) is None:
            break
        index = reader
    return index


def _makes_fewer(log: CandidateLog, call: Call) -> bool:
    """Whether the candidate makes fewer calls of this operator at this place than the reference."""
    return len(log.there(call)) < len(log.reference.there(call))


def packed_otherwise(log: CandidateLog, index: int) -> tuple[int, int] | None:
    """The first call that packs a wrong value, and the call of the reference that it should equal.

    The reference's call must lead to the missing call `index` through packing alone. For example, rows are cut from the
    wrong bucket, and later calls produce right values by chance. None if there is no such call.
    """
    pending, due = list(log.reference.givers(index)), set[int]()
    while pending:
        giver = pending.pop()
        call = log.reference.log[giver]
        if giver not in due and (call.view or name_of(call) in PACKING):
            due.add(giver)
            pending += log.reference.givers(giver)
    operators = {log.reference.log[giver].operator for giver in due}
    alike = (i for i, call in enumerate(log.log) if call.operator in operators and not call.view)
    found = ((i, log.stands_for(i)) for i in alike)
    return next(((i, known) for i, known in found if known is not None and known in due), None)


def launched(log: CandidateLog, index: int) -> int | None:
    """The candidate's call that launches the reference's collective `index` and is never waited for; None if none."""
    # Operator, inputs and outputs are fields 1 to 3.
    call = log.reference.log[index]._replace(outputs=())
    return next((i for i, mine in enumerate(log.log) if call.collective and mine[1:4] == call[1:4]), None)


def misplaced_by(
    differing: Mapping[int, Iterable[Pair]], logs: Sequence[CandidateLog], joined: JoinedLogs
) -> Culprit | None:
    """The call to blame for tensors that hold each other's right values, such as two exchanged gradients.

    It is the first call before the update whose output is the value that such a tensor should have. If this output
    comes from a bucket, it is the copy that overwrote a right value in the bucket with another right value, or else the
    bucket's collective. None if no tensor has another tensor's value.
    """
    found: list[Site] = []
    for rank, pairs in differing.items():
        # For each value that such a tensor should have, the last call before the update that produced it.
        last: dict[str, int] = {}
        values = {wanted for wanted, has in pairs if has != wanted and has in logs[rank].reference.values}
        for index, call in enumerate(logs[rank].log):
            if call.place.direction != "update":
                last |= dict.fromkeys(values.intersection(call.outputs), index)
        found += [(rank, index) for index in last.values()]
    if not found:
        return None
    rank, index = min(found, key=joined.when)
    bucket = logs[rank].bucket_of(index)
    # The bucket was packed, or unpacked, in another order.
    if bucket is not None:
        index = bucket
        history = joined.before([(rank, bucket)], lambda site: logs[site[0]].givers(site[1]))
        # A copy after the bucket was filled.
        if over := {(r, i) for r, i in history if _puts_over(logs[r], i)}:
            rank, index = min(over, key=joined.when)
            ranks = tuple(sorted({r for r, _ in over}))
            call, at = logs[rank].log[index], rank if rank != ranks[0] else None
            return Culprit(how="adds", call=call, ranks=ranks, candidate=index, reference=None, at=at)
    call = logs[rank].log[index]
    return Culprit(how="misplaces", call=call, ranks=(rank,), candidate=index, reference=None)


def _puts_over(log: CandidateLog, index: int) -> bool:
    """Whether a call copies a right value over another right value, and the reference has no such copy."""
    call = log.log[index]
    if name_of(call) != "copy_" or log.given(index)[0] is None or log.reference.alike(call):
        return False
    return len(set(call.inputs)) > 1 and log.reads_right_values(index)
