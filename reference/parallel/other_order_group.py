"""A process group that adds in another order than rank order, to find out whether a case detects that. The orders:

    descending   ((r7 + r6) + r5) + ...
    pairwise     ((r0 + r1) + (r2 + r3)) + ..., as a tree adds
    position     the result of W ranks has W equal blocks; each block's sum begins at another rank and ascends from
                 there, as in a ring

In "position", the order of an element's sum depends on its index in the message. So a gradient in a bucket is added in
another order than in a message of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bitproof.reference.parallel.device_order_group import DeviceOrderGroup
from bitproof.reference.parallel.rank_order_group import sum_in_rank_order

# W ranks of the group; N elements of one rank's part

ORDERS = ("descending", "pairwise", "position")
FEWEST_RANKS = {"descending": 3, "pairwise": 4, "position": 3}
"""For each order, the fewest ranks for which it differs from ascending order.

For example, a sum of two ranks has a single order.
"""


class OtherOrderGroup(DeviceOrderGroup):
    """A group over `transport` that adds floating-point values in `order` while `is_on()` is true.

    It calls `report` before each such sum. With fewer ranks than FEWEST_RANKS has for `order`, it adds in rank order.
    """

    def __init__(
        self, transport: dist.ProcessGroup, order: str, is_on: Callable[[], bool], report: Callable[[], None]
    ) -> None:
        super().__init__(transport)
        self._order = order
        self._is_on = is_on
        self._report = report

    def _sum(self, parts_WN: Tensor) -> Tensor:
        if not self._is_on() or len(parts_WN) < FEWEST_RANKS[self._order] or not parts_WN.is_floating_point():
            return sum_in_rank_order(parts_WN)
        self._report()
        return sum_in_order(parts_WN, self._order)


def sum_in_order(parts_WN: Tensor, order: str) -> Tensor:
    """Sum the ranks' tensors `parts_WN[rank]` in an order of ORDERS, explained at the top of this file.

    Returns (N,).
    """
    match order:
        case "descending":
            return sum_in_rank_order(parts_WN.flip(0))
        case "pairwise":
            return _sum_in_pairs(parts_WN)
        case "position":
            # Rolled by its index, a block's sum begins at another rank than that of the block before it.
            blocks = parts_WN.tensor_split(len(parts_WN), dim=1)
            return torch.cat([sum_in_rank_order(block_WN.roll(-first, 0)) for first, block_WN in enumerate(blocks)])
    raise ValueError(f"no order of sums: {order}")


def _sum_in_pairs(parts_WN: Tensor) -> Tensor:
    if len(parts_WN) < 2:
        return parts_WN[0]
    # An odd number leaves a pair of one rank at the end.
    sums = [sum_in_rank_order(pair) for pair in parts_WN.split(2)]
    return _sum_in_pairs(torch.stack(sums))
