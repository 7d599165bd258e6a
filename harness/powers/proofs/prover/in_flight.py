"""Finds races: calls that read or write memory while a collective that uses it is in flight.

The rules are those of `harness.operators.happens_before`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from bitproof.harness.operators import Operator, known
from bitproof.harness.operators.happens_before import NEVER_FREED, Order, Race
from bitproof.harness.powers.proofs.prover.known_operators import FILLS, is_unwritten
from bitproof.harness.powers.proofs.prover.proof_data import Call, Graph


class InFlight:
    """The collectives in flight (launched, but not waited for), while the calls of a graph run in order.

    Calls are identified by their index in the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self._calls = graph.calls
        self._order = Order(_last_uses(graph))

    def races(self, call: Call) -> list[Race]:
        """Return the races between a call's reads and collectives in flight.

        For example, `mm` reads the result of an all-gather before a call waits for the all-gather. A call that reads no
        elements, such as a view, has no races.
        """
        read = set(self._storages(call.reads))
        # A call whose results are all in the memory that it reads is a view.
        is_shown = not call.writes and bool(read) and {x.storage for x in call.results} == read
        reads_none = _row(call).wait or is_shown or call.op in FILLS or is_unwritten(call.op)
        return [] if reads_none else self._order.races(read, ())

    def races_of_write(self, storage: int) -> list[Race]:
        return self._order.races((), [storage])

    def run(self, index: int, call: Call, awaited: int | None) -> list[Race]:
        """Record a call that launches a collective, or waits for the collective that call `awaited` launched.

        Returns the races of a wait: memory of the collective that was freed before the wait. [] for a launch.
        """
        row = _row(call)
        found = self._order.wait(row.wait, self._storages([awaited]), index) if row.wait and awaited is not None else []
        if row.launch is not None:
            results = [[x.storage] for x in call.results]
            self._order.launch(call.name, index, row.launch, results, self._storages(call.reads))
        return found

    def is_filling(self, index: int) -> bool:
        return self._order.is_filling(self._storages([index]))

    def touching(self, storage: int) -> list[int]:
        return [int(launched) for launched in self._order.touching([storage])]

    def _storages(self, indices: Iterable[int]) -> list[int]:
        return [x.storage for index in indices for x in self._calls[index].results]


def _row(call: Call) -> Operator:
    return known(call.op.rpartition(".")[0])


def _last_uses(graph: Graph) -> dict[Hashable, float]:
    calls, found = graph.calls, dict[Hashable, float]()
    for index, call in enumerate(calls):
        for read in call.reads:
            if 0 <= read < index:  # other code refuses a read of a later call
                found |= {x.storage: float(index) for x in calls[read].results}
    kept = [call for call in calls if call.op in ("input", "constant")]
    kept += [calls[index] for _, index in graph.outputs if 0 <= index < len(calls)]
    return found | {x.storage: NEVER_FREED for call in kept for x in call.results}
