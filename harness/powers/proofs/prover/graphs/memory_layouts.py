"""Checks that real results have the memory layouts of their fake values, on which a proof relies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from bitproof.harness.graph.symbols import source_of
from bitproof.harness.powers.proofs.prover import proof_data as data
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError


class Layouts:
    """Compares the results of a run with the layouts in a graph. It must be called with each node, in graph order."""

    def __init__(self, graph: data.Graph) -> None:
        self._inputs = iter([call for call in graph.calls if call.op == "input"])
        self._calls = {call.name: call for call in graph.calls if call.op != "input"}
        # Per rank, a two-way mapping between the graph's storages and addresses of memory. It must stay one to one.
        self._storages: list[dict[int, int]] = []
        self._numbers: list[dict[int, int]] = []
        # Results are kept alive. Otherwise a later result could get the same address, and would seem to share memory.
        self._held: list[Any] = []

    def __call__(self, node: Node, values: Sequence[Any]) -> None:
        """Compare the real results of a node, a result per rank, with the graph.

        Raises RefusedError, which names the node, if a layout differs.
        """
        call = next(self._inputs) if node.op == "placeholder" else self._calls.get(node.name)
        if call is None:
            return  # a number, or a check
        self._held.append(values)
        for rank, value in enumerate(values):
            if rank == len(self._storages):
                self._storages.append({})
                self._numbers.append({})
            for stated, real in _pairs(call.value, value):
                if otherwise := self._difference(rank, stated, real):
                    raise RefusedError(
                        f"a call whose result lies in memory otherwise than its fake: {otherwise}"
                        f" (`{node.name}`, {node.target})",
                        where=source_of(node),
                    )

    def _difference(self, rank: int, stated: data.Tensor, real: Tensor) -> str | None:
        dtype = str(real.dtype).removeprefix("torch.")
        if dtype != stated.dtype:
            return f"dtype {dtype}, not {stated.dtype}"
        # A size or stride that is no int depends on data: its fake has no number to compare.
        if any(isinstance(n, int) and n != m for n, m in zip(stated.shape, real.shape, strict=True)):
            return f"shape {tuple(real.shape)}, not {stated.shape}"
        if real.numel() == 0:
            return None  # there are no elements
        sides = zip(real.shape, real.stride(), stated.strides, strict=True)
        if any(isinstance(t, int) and n > 1 and s != t for n, s, t in sides):
            return f"strides {real.stride()}, not {stated.strides}"
        if isinstance(stated.offset, int) and real.storage_offset() != stated.offset:
            return f"offset {real.storage_offset()}, not {stated.offset}"
        memory = real.untyped_storage().data_ptr()
        if self._storages[rank].setdefault(stated.storage, memory) != memory:
            return "memory of its own, where its fake shares some"
        if self._numbers[rank].setdefault(memory, stated.storage) != stated.storage:
            return "memory that it shares, where its fake has some of its own"
        return None


def _pairs(stated: Any, value: Any) -> Iterator[tuple[data.Tensor, Tensor]]:
    if isinstance(stated, data.Tensor) and isinstance(value, Tensor):
        yield stated, value
    elif isinstance(value, (tuple, list)) and isinstance(stated, tuple) and stated[:1] != ("size",):
        for one, other in zip(stated, value, strict=False):
            yield from _pairs(one, other)
