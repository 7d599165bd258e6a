"""What is on its way in a graph as data, for the prover and the checker, by `harness.operators.happens_before`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from bitproof.harness.certificate.data import Call, Graph
from bitproof.harness.operators import Operator, known
from bitproof.harness.operators.happens_before import NEVER_FREED, Order, Race


class InFlight:
    """One graph's, as its calls run one after the other. Calls are known by their place in the graph."""

    def __init__(self, graph: Graph) -> None:
        self._calls = graph.calls
        self._order = Order(_last_uses(graph))

    def races(self, call: Call) -> list[Race]:
        """The races of what a call reads now. Who waits, asks for a layout or only shows memory reads none of it."""
        row = _row(call)
        read = set(self._storages(call.reads))
        is_shown = not call.writes and bool(read) and {x.storage for x in call.results} == read
        return [] if row.wait or row.reads_layout or is_shown else self._order.races(read, ())

    def races_of_write(self, storage: int) -> list[Race]:
        """The races of a write to a storage now."""
        return self._order.races((), [storage])

    def run(self, index: int, call: Call, awaited: int | None) -> list[Race]:
        """A call runs, which may launch something or wait for the value of another. Gives what was let go too soon."""
        row = _row(call)
        found = self._order.wait(row.wait, self._storages([awaited]), index) if row.wait and awaited is not None else []
        if row.launch is not None:
            results = [[x.storage] for x in call.results]
            self._order.launch(call.name, index, row.launch, results, self._storages(call.reads))
        return found

    def is_filling(self, index: int) -> bool:
        """Whether something that nobody has waited for fills the memory of a call's value."""
        return self._order.is_filling(self._storages([index]))

    def touching(self, storage: int) -> list[int]:
        """The calls that launched what is on its way and fills or reads a storage."""
        return [int(launched) for launched in self._order.touching([storage])]

    def _storages(self, indices: Iterable[int]) -> list[int]:
        return [x.storage for index in indices for x in self._calls[index].results]


def _row(call: Call) -> Operator:
    return known(call.op.rpartition(".")[0])


def _last_uses(graph: Graph) -> dict[Hashable, float]:
    """When each storage is used last, by the place of the call. The caller keeps inputs, constants and outputs."""
    calls, found = graph.calls, dict[Hashable, float]()
    for index, call in enumerate(calls):
        for read in call.reads:
            if 0 <= read < index:  # a read of a later call is refused elsewhere
                found |= {x.storage: float(index) for x in calls[read].results}
    kept = [call for call in calls if call.op in ("input", "constant")]
    kept += [calls[index] for _, index in graph.outputs if 0 <= index < len(calls)]
    return found | {x.storage: NEVER_FREED for call in kept for x in call.results}
