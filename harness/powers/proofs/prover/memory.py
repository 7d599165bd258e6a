"""Tracks the memory of a graph: values that share memory, overwritten values, and collectives in flight.

Calls are identified by their index in the graph. A storage is a piece of memory that several values may share. The
storages are those of the exported graph, which `harness.step` cannot provide: a proof believes no metadata of fx nodes.
The rules for collectives in flight are those of `harness.operators.happens_before`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from bitproof.harness.operators import Operator, known
from bitproof.harness.operators.happens_before import NEVER_FREED, Order, Race
from bitproof.harness.powers.proofs.prover import known_operators
from bitproof.harness.powers.proofs.prover.graphs.export import refuse
from bitproof.harness.powers.proofs.prover.layouts import overlaps
from bitproof.harness.powers.proofs.prover.proof_data import Call, Graph, Tensor, nodes_in


class GraphMemory:
    """Tracks the memory of a graph while its calls run in order.

    A value is stale once another call wrote into its memory. A collective is in flight until a call waits for it.
    """

    def __init__(self, graph: Graph) -> None:
        self.calls = graph.calls
        self._owners: dict[int, list[int]] = {}  # by storage, the calls whose values are in it
        self._stale: dict[int, int] = {}  # by call whose value was overwritten, the call that overwrote it
        self._order = Order(_last_uses(graph))

    def hold(self, index: int) -> None:
        for tensor in self.calls[index].results:
            self._owners.setdefault(tensor.storage, []).append(index)

    def is_stale(self, index: int) -> bool:
        return index in self._stale

    def is_in_flight(self, index: int) -> bool:
        return self._order.is_filling(self._storages([index]))

    def writers(self, index: int) -> list[int]:
        """Return the indices of the in-place calls so far that wrote into the storage of a call's result."""
        owners = [owner for storage in self._storages([index]) for owner in self._owners[storage]]
        return [owner for owner in owners if self.calls[owner].writes]

    def refuse_stale(self, index: int, reader: Call) -> None:
        if index in self._stale:
            name, writer = self.calls[index].name, self.calls[self._stale[index]].name
            raise refuse(reader, f"`{name}` is read after `{writer}` wrote a part of its memory")

    def refuse_read_in_flight(self, call: Call) -> None:
        """Raise RefusedError if a call reads memory that a collective in flight fills.

        For example, `mm` reads the result of an all-gather before a call waits for the all-gather. A call that reads no
        elements, such as a view, is not refused.
        """
        read = set(self._storages(call.reads))
        # A call whose results are all in the memory that it reads is a view.
        is_shown = not call.writes and bool(read) and {x.storage for x in call.results} == read
        is_fill = call.op in known_operators.FILLS or known_operators.is_unwritten(call.op)
        if not (_row(call).wait or is_shown or is_fill):
            self._refuse(call, self._order.races(read, ()))

    def run(self, index: int, call: Call, awaited: int | None) -> None:
        """Record a call that launches a collective, or waits for the collective that call `awaited` launched.

        Raises RefusedError for a wait if the collective uses memory that may have been freed since the launch.
        """
        row = _row(call)
        if row.wait and awaited is not None:
            self._refuse(call, self._order.wait(row.wait, self._storages([awaited]), index))
        if row.launch is not None:
            results = [[x.storage] for x in call.results]
            self._order.launch(call.name, index, row.launch, results, self._storages(call.reads))

    def _refuse(self, call: Call, races: Sequence[Race]) -> None:
        if races:
            raise refuse(call, races[0].describe("it"))

    def _storages(self, indices: Iterable[int]) -> list[int]:
        return [x.storage for index in indices for x in self.calls[index].results]

    def written(self, call: Call, args: Mapping[str, Any]) -> Tensor:
        """Return the tensor that an in-place call such as `add_` writes: its argument `self`.

        Raises RefusedError if the call:

        - writes another argument, or writes a constant;
        - changes a layout;
        - writes memory that a collective may be using;
        - has a result that depends on the order in which elements are read and written.
        """
        if call.writes != ("self",) or not call.op.split(".")[1].endswith("_") or args["self"][:1] != ("node",):
            raise refuse(call, f"{call.op} writes in a way that is not understood")
        target = self.calls[args["self"][1]].value
        if target != call.value or call.op in known_operators.REFUSED:
            raise refuse(call, f"{call.op} changes a tensor's layout")
        # The last write to a shared element would win, and the order of writes is not defined.
        if overlaps(target):
            raise refuse(call, "a write to memory that overlaps itself")
        if any(self.calls[owner].op == "constant" for owner in self._owners[target.storage]):
            raise refuse(call, "a write to a tensor of the graph itself, which the next step would find changed")
        for read in (index for name, value in call.args if name != "self" for index in nodes_in(value)):
            for tensor in self.calls[read].results:
                # For example `x[1:].copy_(x[:-1])`: elements may be read before or after they are written.
                if tensor.storage == target.storage and tensor != target:
                    raise refuse(call, "a write to memory that the same call reads in another way")
        self._refuse(call, self._order.races((), [target.storage]))
        return target

    def overwrite(self, index: int, target: Tensor) -> list[int]:
        """Record that call `index` writes `target`.

        Returns the indices of the calls whose results are exactly `target`. These results have the new value. All other
        results in this storage, such as a slice of `target`, become stale: later reads of them are refused.
        """
        same = []
        for owner in self._owners[target.storage]:
            if self.calls[owner].value == target:
                same.append(owner)
            else:
                self._stale[owner] = index
        return same

    def distrust(self, index: int) -> None:
        """Treat the memory of a refused call's arguments as overwritten, since the call may have written it.

        Later reads of all values in this memory are refused, and so are reads of the results of collectives in flight
        that use this memory.
        """
        for storage in self._storages(self.calls[index].reads):
            torn = map(int, self._order.touching([storage]))
            self._stale.update(dict.fromkeys([*self._owners[storage], *torn], index))


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
