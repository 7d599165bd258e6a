"""Correct the logs for broadcasts that change no memory: they are no part of a value's history.

DistributedDataParallel sends every buffer from rank 0 before each forward. If all ranks have the same buffer already,
such an idle broadcast changes nothing. Example, on both ranks:

    broadcast_ p -> p    slice p -> q    embedding w q -> e        slice reads p from before the step

- An idle broadcast is logged without outputs. Its readers read the broadcast's input instead.
- If several buffers are joined, sent and copied back, a copy that writes back an unchanged part has no outputs either.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.localize.logs.calls import Call, returns_only_inputs
from bitproof.harness.localize.logs.joined_logs import JoinedLogs
from bitproof.harness.localize.logs.packing import name_of

_BROADCASTS = {"broadcast_", "broadcast"}


def without_idle_broadcasts(logs: Sequence[Sequence[Call]]) -> list[Sequence[Call]]:
    """Return the logs of all ranks, without the idle broadcasts among the producers of calls.

    Calls keep their indices.
    """
    joined = JoinedLogs(logs)
    return [_rewritten(calls, _idle(rank, calls, joined)) for rank, calls in enumerate(logs)]


def _idle(rank: int, calls: Sequence[Call], joined: JoinedLogs) -> set[int]:
    """Return the indices of a rank's idle broadcasts, which change no memory on any rank."""
    return {
        index
        for index, call in enumerate(calls)
        if name_of(call) in _BROADCASTS
        and all(returns_only_inputs(joined.logs[peer][i]) for peer, i in joined.together((rank, index)))
    }


def _rewritten(calls: Sequence[Call], idle: set[int]) -> Sequence[Call]:
    if not idle:
        return calls
    # In log order, so that the entry of a removed call, to which a reader is connected, is rewritten before the reader.
    gone, found = set(idle), list[Call]()
    for index, call in enumerate(calls):
        back = _copied_back(calls, index, idle)
        gone |= back
        # Views that cut the part out of the bucket come before the copy, so they are in `found` already.
        for number in sorted(back - {index}):
            found[number] = _without_outputs(found[number])
        # Readers of a removed output read the value from before: their producer is that of the broadcast's input.
        producers = tuple(
            _producer_of_input(found[producer], value) if producer in gone and producer is not None else producer
            for value, producer in zip(call.inputs, call.producers, strict=False)
        )
        call = call._replace(producers=(*producers, *call.producers[len(producers) :]))
        found.append(_without_outputs(call) if index in gone else call)
    return found


def _copied_back(calls: Sequence[Call], index: int, idle: set[int]) -> set[int]:
    """Return the indices of a `copy_` that copies an idle broadcast back, and of the views that select the copied part.

    `index` is the index of the `copy_`, and `idle` has those of the idle broadcasts. Returns an empty set for other
    calls.
    """
    call = calls[index]
    if name_of(call) != "copy_" or len(call.producers) < 2 or call.outputs[:1] != call.inputs[:1]:
        return set()
    # The second input of `copy_` is the copied part. Follow its views back to the bucket.
    found, shown = {index}, call.producers[1]
    while shown is not None and shown not in idle and calls[shown].view and calls[shown].producers:
        found.add(shown)
        shown = calls[shown].producers[0]
    return found if shown in idle else set()


def _without_outputs(call: Call) -> Call:
    return call._replace(outputs=(), aliases=())


def _producer_of_input(call: Call, value: str) -> int | None:
    """Return the index of the call that produced an input of an idle call: the input with the digest `value`.

    None if the producer is unknown, or if no input has this digest.
    """
    return next((p for x, p in zip(call.inputs, call.producers, strict=False) if x == value), None)
