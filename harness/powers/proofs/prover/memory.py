"""Tracks the memory of a graph: values that share memory, overwritten values, and collectives in flight.

Calls are identified by their index in the graph. A storage is a piece of memory that several values may share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitproof.harness.operators.happens_before import Race
from bitproof.harness.powers.proofs.prover import known_operators
from bitproof.harness.powers.proofs.prover.graphs.export import refuse
from bitproof.harness.powers.proofs.prover.in_flight import InFlight
from bitproof.harness.powers.proofs.prover.layouts import overlaps
from bitproof.harness.powers.proofs.prover.proof_data import Call, Graph, Tensor, nodes_in


class GraphMemory:
    """Tracks the memory of a graph while its calls run in order.

    A value is stale once another call wrote into its memory.
    """

    def __init__(self, graph: Graph) -> None:
        self.calls = graph.calls
        self._owners: dict[int, list[int]] = {}  # by storage, the calls whose values are in it
        self._stale: dict[int, int] = {}  # by call whose value was overwritten, the call that overwrote it
        self._in_flight = InFlight(graph)

    def hold(self, index: int) -> None:
        for tensor in self.calls[index].results:
            self._owners.setdefault(tensor.storage, []).append(index)

    def is_stale(self, index: int) -> bool:
        return index in self._stale

    def is_in_flight(self, index: int) -> bool:
        return self._in_flight.is_filling(index)

    def writers(self, index: int) -> list[int]:
        """Return the indices of the in-place calls so far that wrote into the storage of a call's result."""
        owners = [owner for x in self.calls[index].results for owner in self._owners[x.storage]]
        return [owner for owner in owners if self.calls[owner].writes]

    def refuse_stale(self, index: int, reader: Call) -> None:
        if index in self._stale:
            name, writer = self.calls[index].name, self.calls[self._stale[index]].name
            raise refuse(reader, f"`{name}` is read after `{writer}` wrote a part of its memory")

    def refuse_read_in_flight(self, call: Call) -> None:
        self._refuse(call, self._in_flight.races(call))

    def run(self, index: int, call: Call, awaited: int | None) -> None:
        """Record a call that launches a collective, or waits for the collective that call `awaited` launched.

        Raises RefusedError for a wait if the collective uses memory that may have been freed since the launch.
        """
        self._refuse(call, self._in_flight.run(index, call, awaited))

    def _refuse(self, call: Call, races: Sequence[Race]) -> None:
        if races:
            raise refuse(call, races[0].describe("it"))

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
        self._refuse(call, self._in_flight.races_of_write(target.storage))
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
        for read in self.calls[index].reads:
            for tensor in self.calls[read].results:
                torn = self._in_flight.touching(tensor.storage)
                self._stale.update(dict.fromkeys([*self._owners[tensor.storage], *torn], index))
