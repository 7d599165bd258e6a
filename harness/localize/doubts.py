"""Calls of which no value tells whether they are wrong in place of the one to blame: see `Culprit.or_else`.

A call that reads and gives right values may have read one in another's place: no value tells. But then more calls read
that here than in the reference. Of those that lead to the blamed call the first count, the last, and what packs.
Nor does any value tell which of several calls gave what a record holds. Views count of a bucket that the reference does
not have, and of what was written to since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog, is_again
from bitproof.harness.localize.logs.joined_logs import JoinedLogs, Site

UNSURE = "reads", "adds", "lacks", "misplaces"
"""What is wrong with a call of which no other makes sure."""


def doubts(
    culprit: Culprit, rank: int, pair: Pair, logs: Sequence[CandidateLog], joined: JoinedLogs
) -> tuple[Call, ...]:
    """The calls that may be wrong in the blamed one's place, where that leads to a record of a rank."""
    if culprit.how not in UNSURE and not (culprit.how == "computes" and culprit.call.collective):
        return ()
    repeated = [_reads_too_often(log) for log in logs]
    found, seen = list[Site](), set[Site]()
    start = logs[rank].giver(*pair) if culprit.candidate is None else culprit.candidate
    if culprit.candidate is None:
        there = logs[culprit.rank].there(culprit.call)
        found += [(culprit.rank, index) for index in there if index in repeated[culprit.rank]]
    else:
        others = (i for i, call in enumerate(logs[rank].log) if pair[1] in call.outputs and not logs[rank].packs(i))
        found += [(rank, i) for i in others if (rank, i) != (culprit.rank, start) and i != logs[rank].giver(*pair)]
        rank = culprit.rank
        found += [(rank, index) for index in _views(logs[rank], culprit.candidate)]
    pending = [] if start is None else [(rank, start, 0)]
    while pending:
        on, index, far = pending.pop()
        sites = set(joined.together((on, index))) - seen
        seen |= sites
        given = ((peer, giver) for peer, i in sites for giver in logs[peer].givers(i))
        earlier = [(peer, i) for each in given for peer, i in joined.together(each) if i in repeated[peer]]
        packs = logs[on].packs(index) and len(logs[on].log[index].inputs) > 1
        if far and (far == 1 or not earlier or packs) and logs[on].reads_right_values(index):
            found.append((on, index))
        pending += [(*each, far + 1) for each in earlier if each not in seen]
    calls = dict.fromkeys(logs[on].log[index] for on, index in sorted(found, key=joined.when))
    return tuple({str(call): call for call in calls if str(call) not in culprit.reading}.values())


def _reads_too_often(log: CandidateLog) -> set[int]:
    """The calls of which more, of one operator and the same inputs, are made than in the reference.

    What is computed again does not count.
    """
    made = Counter(_reading(call) for call in log.log if not is_again(call))
    made.subtract(map(_reading, log.reference.log))
    return {index for index, call in enumerate(log.log) if made[_reading(call)] > 0 and not is_again(call)}


def _reading(call: Call) -> tuple[str, tuple[str, ...]]:
    return call.operator, tuple(sorted(call.inputs))


def _views(log: CandidateLog, index: int) -> list[int]:
    """Views that may show other elements than they should: of a bucket that a call sums, or of what it reads.

    The latter where the call that left what is read wrote to the tensor whose part the view shows.
    """
    call = log.log[index]
    if call.collective and not log.reference.alike(call):
        return [i for i, each in enumerate(log.log) if each.view and index in log.given(i)]
    writers = [i for i in log.givers(index) if set(call.inputs) & set(log.log[i].aliases)]
    return [
        i
        for writer in writers
        for i, each in enumerate(log.log[:writer])
        if each.view and each.inputs == log.log[writer].inputs[:1]
    ]
