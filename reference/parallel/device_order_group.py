"""A process group that sums over ranks on the device, in ascending rank order.

NCCL chooses the order of a sum by algorithm, message size and the ranks' positions in its rings. So a bucketed
reduce-scatter may add in another order than a reduce-scatter for each parameter. Here the backend (`transport`) only
moves bits, and each rank adds the parts in rank order when it waits:

    reduce-scatter          an all-to-all. Moves as many bytes as a ring; needs memory for a second copy of its input,
                            and for its result
    all-reduce, small       every rank gathers all inputs: W / 2 times the traffic of a ring of W ranks
    all-reduce, large       a reduce-scatter and, in the wait, an all-gather of the sums. Moves as many bytes as a ring;
                            needs memory for two more copies of its input

An all-reduce is large if the inputs of all ranks take more than `MOST_GATHERED` bytes.
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
from bitproof.reference.parallel.rank_order_group import RankOrderGroup, sum_in_rank_order

# W ranks of the group; N elements of one rank's part


MOST_GATHERED = 64 * 2**20
"""The most bytes that an all-reduce gathers on a rank."""


class DeviceOrderGroup(RankOrderGroup):
    """Collectives with the same bits as those of `RankOrderGroup`, but without a copy to host memory.

    `transport` moves the tensors: NCCL on GPUs, gloo on a CPU.
    """

    def __init__(self, transport: dist.ProcessGroup) -> None:
        # Not `super().__init__`, which takes a gloo group.
        dist.ProcessGroup.__init__(self, transport.rank(), transport.size())  # type: ignore[call-arg]
        self._transport = transport

    def getBackendName(self) -> str:
        return self._transport.name()

    def _all_to_all(self, output: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Work:
        return self._exchange(output, x.contiguous(), output_splits, input_splits)

    def _all_gather(self, output: Tensor, x_N: Tensor) -> Work:
        x_N = x_N.contiguous()
        # The transport's own all-gather sums nothing, and so needs no order.
        work = flat_collectives(self._transport)[0](output.view(-1), x_N.view(-1))
        return _PendingWork(work, x_N)

    def _reduce_scatter(self, output_N: Tensor, x: Tensor) -> Work:
        sent_WN = x.contiguous().view(self.size(), -1)
        received_WN = torch.empty_like(sent_WN)
        work = self._exchange(received_WN, sent_WN, [], [])
        return _PendingWork(work, sent_WN, lambda: output_N.view(-1).copy_(self._sum(received_WN)))

    def _all_reduce(self, x: Tensor) -> Work:
        if self.size() * x.nbytes > MOST_GATHERED:
            return self.all_reduce_by_parts(x)
        gathered_WN = x.new_empty(self.size(), x.numel())
        work = self._all_gather(gathered_WN, x)
        return _PendingWork(work, gathered_WN, lambda: x.copy_(self._sum(gathered_WN).view_as(x)))

    def all_reduce_by_parts(self, x: Tensor) -> Work:
        """Sum a tensor over ranks in rank order, in place.

        Each of the W ranks sums 1/W of the elements. Then all ranks gather the sums.
        """
        # Padded with zeros to W equal parts; the last parts' padding is left out of the result.
        sent_WN = x.new_zeros(self.size(), -(-x.numel() // self.size()))
        sent_WN.view(-1)[: x.numel()].copy_(x.reshape(-1))
        received_WN = torch.empty_like(sent_WN)
        work = self._exchange(received_WN, sent_WN, [], [])

        def finish() -> None:
            sum_N = self._sum(received_WN)
            # The received parts are not needed any more, so the sums are gathered into their memory.
            gathering = self._all_gather(received_WN, sum_N)
            gathering.wait()
            x.copy_(received_WN.view(-1)[: x.numel()].view_as(x))

        return _PendingWork(work, sent_WN, finish)

    def _sum(self, parts_WN: Tensor) -> Tensor:
        if parts_WN.is_cuda and parts_WN.is_floating_point() and sums_in_one_kernel(parts_WN.device, parts_WN.dtype):
            return sum_in_one_kernel(parts_WN)
        return sum_in_rank_order(parts_WN)

    def _exchange(self, output: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Work:
        return _PendingWork(self._transport.alltoall_base(output, x, output_splits, input_splits), x)


class _PendingWork(Work):
    """An async handle that keeps the collective's input `read` alive until the wait, and then calls `finish`."""

    def __init__(self, work: Work, read: Tensor, finish: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._work = work
        self._read: Tensor | None = read
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        # On CUDA only the current stream waits. `finish` runs on that stream, and the host continues.
        self._work.wait()
        finish, self._finish, self._read = self._finish, None, None
        if finish is not None:
            finish()
        return True


def sum_in_one_kernel(parts_WN: Tensor) -> Tensor:
    """Return the sum over dim 0 in rank order, by a Triton kernel that reads each part once.

    The bits equal those of sequential additions.
    """
    from bitproof.reference.parallel.rank_order_kernel import add_parts

    parts_WN = parts_WN if parts_WN[0].is_contiguous() else parts_WN.contiguous()
    total_N = torch.empty_like(parts_WN[0])
    add_parts(parts_WN, total_N)
    return total_N


def sums_in_one_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return why_no_kernel(device, dtype) is None


@functools.cache
def why_no_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why a device does not sum tensors of this dtype with the Triton kernel; None if it does."""
    large = 2 / torch.finfo(dtype).eps  # ascending: the first 1 is lost, the sum is 1; descending: it is 2
    ordered_W = torch.tensor([large, 1.0, -large, 1.0], dtype=dtype, device=device)
    many_WN = torch.randn(4, 4097, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    # Four ranks. The order of a sum shows in the first three columns; the others have random numbers of two magnitudes.
    # 8,197 columns do not fill the kernel's last block.
    known_WN = torch.cat([ordered_W.unsqueeze(1).expand(4, 3), many_WN, many_WN.flip(0) * large], dim=1)
    try:
        is_right = torch.equal(sum_in_one_kernel(known_WN), sum_in_rank_order(known_WN))
    except Exception as error:  # no Triton, or no compiler for it
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None if is_right else "the kernel gives other bits"


def sums_of(device: torch.device) -> str:
    """Return a description of how a device sums float32 and bfloat16 over ranks, such as "by one Triton kernel".

    Manifests and reports show it.
    """
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        why = why_no_kernel(device, dtype)
        found[str(dtype).removeprefix("torch.")] = "by one Triton kernel" if why is None else f"by additions ({why})"
    if len(ways := {*found.values()}) == 1:
        return ways.pop()
    return ", ".join(f"{how} in {name}" for name, how in found.items())
