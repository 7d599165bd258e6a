"""Each wait, and each hold on memory, of the groups that add in rank order is needed: without it a late stream shows.

The groups' own files run over a transport whose work is done only when it is waited for, and which reads what it sends
no earlier. Then each line that waits or holds is taken away in turn, and the bits must be wrong.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef

from bitproof.reference.parallel import device_order_group, rank_order_group

GROUPS = {
    "rank_order_group": (Path(rank_order_group.__file__), "RankOrderGroup"),
    "device_order_group": (Path(device_order_group.__file__), "DeviceOrderGroup"),
}


class LateWork(Work):
    def __init__(self, done: Callable[[], None]) -> None:
        super().__init__()
        self._done: Callable[[], None] | None = done

    def wait(self, timeout: Any = None) -> bool:
        done, self._done = self._done, None
        if done is not None:
            done()
        return True


class LateTransport(dist.ProcessGroup):
    """Two ranks that send alike. gloo holds what it reads; with `holds` false nobody does, as on a stream."""

    def __init__(self, holds: bool) -> None:
        super().__init__(0, 2)  # type: ignore[call-arg]
        self._holds = holds

    def _later(self, x: Tensor) -> Callable[[], Tensor]:
        """What will lie then where `x` lies now."""
        if self._holds:
            return lambda: x
        place = x.dtype, x.storage_offset(), x.size(), x.stride()
        memory = StorageWeakRef(x.untyped_storage())

        def found() -> Tensor:
            dtype, *layout = place
            storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)  # type: ignore[attr-defined]
            if storage is None:
                return torch.full(layout[1], float("nan"), dtype=dtype)
            return torch.empty(0, dtype=dtype).set_(storage, *layout)

        return found

    def name(self) -> str:
        return "late"

    def alltoall_base(self, output: Tensor, x: Tensor, *splits: Any) -> Work:  # type: ignore[override]
        sent, parts = self._later(x), x.shape[0] // 2

        def done() -> None:
            mine = sent()[:parts]
            output.copy_(torch.cat([mine, mine]))

        return LateWork(done)

    def _allgather_base(self, output: Tensor, x: Tensor, opts: Any = None) -> Work:
        sent = self._later(x)

        def done() -> None:
            output.copy_(sent().repeat(2))

        return LateWork(done)


def group_of(source: str, name: str) -> Any:
    """The group that a file's text makes, over the late transport."""
    module = types.ModuleType(f"mutant_{name}")
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    module.__spec__ = spec
    sys.modules[module.__name__] = module  # type checks of dataclasses look there
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    return getattr(module, name)(LateTransport(holds=name == "RankOrderGroup"))


def results(group: Any) -> list[list[float]]:
    """What each collective gives, whose caller lets go of what it sent where it may, before it waits."""
    found = []

    def took(begin: Callable[[Tensor], tuple[Tensor, Any]]) -> None:
        x = torch.arange(4.0) + 1
        output, work = begin(x)
        del x
        torch.full((4,), -7.0)
        work.wait()
        found.append(output.flatten().tolist())

    def gather(x: Tensor) -> tuple[Tensor, Any]:
        output = torch.zeros(8)
        return output, group._allgather_base(output, x.t())

    def scatter(x: Tensor) -> tuple[Tensor, Any]:
        output = torch.zeros(2)
        return output, group._reduce_scatter_base(output, x + 0)

    def reduce(x: Tensor) -> tuple[Tensor, Any]:
        total = x.clone()
        return total, group.allreduce([total])

    def reduce_large(x: Tensor) -> tuple[Tensor, Any]:
        module: Any = sys.modules[type(group).__module__]
        most, module.MOST_GATHERED = getattr(module, "MOST_GATHERED", None), 0
        total = x.clone()
        work = group.allreduce([total])
        module.MOST_GATHERED = most
        return total, work

    def exchange(x: Tensor) -> tuple[Tensor, Any]:
        output = torch.zeros(4)
        return output, group.alltoall_base(output, x + 0, [2, 2], [2, 2])

    def several(x: Tensor) -> tuple[Tensor, Any]:
        outputs = [torch.zeros(8), torch.zeros(8)]
        work = group.allgather_into_tensor_coalesced(outputs, [x, x + 1])
        return _Joined(outputs), work  # type: ignore[return-value]

    large = (reduce_large,) if type(group).__name__ == "DeviceOrderGroup" else ()
    for begin in (gather, scatter, reduce, exchange, several, *large):
        took(begin)
    return found


class _Joined:
    def __init__(self, outputs: list[Tensor]) -> None:
        self.outputs = outputs

    def flatten(self) -> Tensor:
        return torch.cat(self.outputs)


ALL: list[list[float]] = [
    [1, 2, 3, 4, 1, 2, 3, 4],
    [2, 4],
    [2, 4, 6, 8],
    [1, 2, 1, 2],
    [1, 2, 3, 4, 1, 2, 3, 4, 2, 3, 4, 5, 2, 3, 4, 5],
]
EXPECTED = {"rank_order_group": ALL, "device_order_group": [*ALL, [2, 4, 2, 4]]}
"""What two ranks get that send alike; of a large tensor each sums the first half."""


def guards(path: Path) -> list[tuple[int, str, str]]:
    """Lines that wait or hold, each with the line that is left of it."""
    found = []
    for number, line in enumerate(path.read_text().splitlines()):
        body = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if (body.endswith(".wait()") and not body.startswith(("def", "return"))) or body.startswith("finish()"):
            found.append((number, body, f"{indent}pass"))
        elif body.startswith("self._read: Tensor | None = read"):
            found.append((number, body, f"{indent}self._read = None"))
    return found


MUTANTS = [(name, *guard) for name, (path, _) in GROUPS.items() for guard in guards(path)]


@pytest.mark.parametrize("name", GROUPS)
def test_over_a_late_transport_every_collective_has_its_bits(name: str) -> None:
    path, group = GROUPS[name]
    assert results(group_of(path.read_text(), group)) == EXPECTED[name]


def test_there_are_guards_to_take_away() -> None:
    assert {name for name, *_ in MUTANTS} == set(GROUPS) and len(MUTANTS) >= 6


@pytest.mark.parametrize(("name", "number", "body", "left"), MUTANTS, ids=lambda value: str(value))
def test_without_one_wait_or_hold_bits_are_wrong(name: str, number: int, body: str, left: str) -> None:
    path, group = GROUPS[name]
    lines = path.read_text().splitlines()
    assert lines[number].strip() == body
    lines[number] = left
    assert results(group_of("\n".join(lines), group)) != EXPECTED[name]
