"""A sum over ranks that the candidate lacks, or whose result no call reads.

If all ranks have the same term, the sum is a multiple of it, and after a division the term again: with or without the
sum, the values are the same. For example, two ranks have g, the sum is 2g, and its mean g. Then the call that reads the
sum looks wrong itself, or missing. But the number of sums in a step still shows the defect. If terms differ, the sum
differs from each, and the other rules of `blame` find the cause.

1. Begin with the inputs of the culprit's partner, if the culprit is new, missing, or has different arguments. A new
   call that keeps all elements in their order cannot be wrong: then begin with its first reader.
2. Go back in the reference through calls of a single input to a sum over ranks: the culprit should have read this sum,
   scaled or in another shape. All ranks must have the same term.
3. The candidate must have the sum's terms. If it has fewer sums of that operator in that direction, and no other
   collective instead, the sum is missing. If it has the sum and no call reads it, the sum is discarded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs, Site
from bitproof.harness.localize.logs.packing import keeps_order, name_of
from bitproof.harness.localize.logs.reference_log import IndexedLog, ReferenceLog
from bitproof.harness.operators import named


def or_lost_sum(culprit: Culprit, log: CandidateLog, joined: JoinedLogs) -> Culprit:
    """The missing or discarded sum before the culprit, or else the culprit itself.

    `log` is the log of the culprit's rank, and `joined` has the reference's logs of all ranks.
    """
    known = log.reference
    for start in _read_there(culprit, log):
        index = _sum_behind(known, start)
        if index is None or not log.has(known.log[index].inputs) or not _sums_equals((culprit.rank, index), joined):
            continue
        call = known.log[index]
        mine, theirs = (_collectives(each, call.place.direction) for each in (log, known))
        if mine[call.operator] < theirs[call.operator] and not mine - theirs:
            return replace(culprit, how="lacks", call=call, candidate=None, reference=index, arguments="", reading="")
        # Fields 1 to 3 are the operator, the inputs and the outputs.
        made = [i for i, each in enumerate(log.log) if each[1:4] == call[1:4] and each.place == call.place]
        if made and not any(made[-1] in log.given(i) for i in range(made[-1] + 1, len(log.log))):
            call = log.log[made[-1]]
            return replace(
                culprit, how="discards", call=call, candidate=made[-1], reference=index, arguments="", reading=""
            )
    return culprit


def _read_there(culprit: Culprit, log: CandidateLog) -> Iterator[int]:
    """The calls of the reference that produced the inputs which the culprit should have (step 1)."""
    index, partner, known = culprit.candidate, culprit.reference, log.reference
    while culprit.how == "adds" and index is not None and keeps_order(log.log[index]):
        index = next((i for i in range(index + 1, len(log.log)) if index in log.given(i)), None)
        if index is not None and not keeps_order(log.log[index]):
            partner, _ = known.partner(log.log[index], log.turn(index))
    # A call with the same arguments is wrong itself.
    is_unlike = culprit.how == "computes" and culprit.arguments
    if not (is_unlike or culprit.how in ("adds", "lacks")) or partner is None:
        return
    # The inputs that an extra call shares with the partner are there, so only the others can be a missing sum.
    read = () if culprit.how in ("computes", "lacks") or index is None else log.log[index].inputs
    for value, giver in zip(known.log[partner].inputs, known.given(partner), strict=False):
        if giver is not None and value not in read:
            yield giver


def _sum_behind(log: ReferenceLog, index: int) -> int | None:
    """The sum over ranks from which the call `index` computes its output by calls of a single input (step 2).

    None if there is none. For example, `div` and `view` lead from a mean gradient back to its `all_reduce`.
    """
    while not named(name_of(log.log[index])).sums_ranks:
        given = log.given(index)
        if len(log.log[index].inputs) != 1 or not given or given[0] is None:
            return None
        index = given[0]
    return index


def _sums_equals(site: Site, joined: JoinedLogs) -> bool:
    """Whether several ranks take part in a sum, all with the same term."""
    sites = joined.together(site)
    return len(sites) > 1 and len({joined.logs[rank][index].inputs for rank, index in sites}) == 1


def _collectives(log: IndexedLog, direction: str | None) -> Counter[str]:
    """The number of collectives of each operator in a direction."""
    return Counter(call.operator for call in log.log if call.collective and call.place.direction == direction)
