"""A process group that reports each collective before and after its launch, and before and after its wait.

The Python stack of a rank that hangs does not show for which collective it waits. So each rank first writes a line of
text, such as "waits for all_reduce 7 of group fsdp", to a board in shared memory (`harness.shared_memory.Board`).
Another process reads the board.

The number in the line counts the group's collectives, equally on all ranks. So the other ranks wait for the rank with
the lowest number. On CUDA, a launch may be reported before it has started on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from bitproof.harness.torch_distributed import flat_collectives

Report = Callable[[str], None]


class ReportingGroup(dist.ProcessGroup):
    """Runs the collectives of another group, `inner`. The group's name in the reported lines is `name`.

    Before and after each launch and each wait, it calls `report` with a line of text.
    """

    def __init__(self, inner: dist.ProcessGroup, name: str, report: Report) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self._name = name
        self._report = report
        self._launched = 0

    def getBackendName(self) -> str:
        return self.inner.name()

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._launch("all_gather", inputs, self.inner.allgather_into_tensor_coalesced, outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        call = self.inner.reduce_scatter_tensor_coalesced
        return self._launch("reduce_scatter", inputs, call, outputs, inputs, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._launch("all_reduce", tensors, self.inner.allreduce_coalesced, tensors, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        return self._launch("all_reduce", tensors, self.inner.allreduce, tensors, opts)

    def _allgather_base(self, output: Tensor, x: Tensor, opts: Any = None) -> Work:
        return self._launch("all_gather", [x], flat_collectives(self.inner)[0], output, x, opts)

    def _reduce_scatter_base(self, output: Tensor, x: Tensor, opts: Any = None) -> Work:
        return self._launch("reduce_scatter", [x], flat_collectives(self.inner)[1], output, x, opts)

    def alltoall_base(
        self, output: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        call = self.inner.alltoall_base
        return self._launch("all_to_all", [x], call, output, x, output_splits, input_splits, opts)

    # torch releases call different names of one method (see `rank_order_group.py`).
    all_gather_single = _allgather_base  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _launch(self, kind: str, inputs: list[Tensor], call: Callable[..., Work], *given: Any) -> Work:
        self._launched += 1
        size = inputs[0].nbytes if len(inputs) == 1 else sum(x.nbytes for x in inputs)
        what = f"{kind} {self._launched} of group {self._name}, {size} bytes of {_name_of(inputs[0].dtype)}"
        self._report(f"launches {what}")
        # Options that were not given are left out, so that the inner group uses its own defaults.
        work = call(*[x for x in given if x is not None])
        self._report(f"launched {what}")
        return _ReportedWork(work, what, self._report)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _ReportedWork(Work):
    def __init__(self, work: Work, what: str, report: Report) -> None:
        super().__init__()
        self._work = work
        self._what = what
        self._report = report

    def wait(self, timeout: Any = None) -> bool:
        self._report(f"waits for {self._what}")
        self._work.wait()
        self._report(f"has waited for {self._what}")
        return True
