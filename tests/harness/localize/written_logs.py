"""Logs that tests write by hand, with the producers that the log of a run would have."""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.localize.logs.calls import Call


def with_producers(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of a rank, in order, each with the producers of its inputs.

    The producer of an input is the last earlier call with an equal output. Calls that state producers keep them.
    """
    found, last = list[Call](), dict[str, int]()
    for index, call in enumerate(calls):
        found.append(call if call.producers else call._replace(producers=tuple(map(last.get, call.inputs))))
        last |= dict.fromkeys((*call.aliases, *call.outputs), index)
    return found
