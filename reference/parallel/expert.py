"""Expert parallelism: sends rows to the ranks of their experts, and the results back.

With L local experts, rank i of the expert group has experts [i * L, (i + 1) * L).

1. Rows to send are sorted by expert, so the rows for a rank are adjacent.
2. Ranks exchange the numbers of rows, then the rows.
3. `dispatch` sorts received rows by expert, for the grouped matrix product. Rows of an expert stay in the order of
   their senders.
4. `combine` restores the order by sender, and sends the results back.
"""

# E experts in all, L local experts, W ranks of the expert group, R rows sent, P rows received, D row size,
# C slots of an expert for each rank's rows

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from bitproof.reference.parallel.collectives import all_to_all


class AllToAll(torch.autograd.Function):
    """All-to-all of rows with different splits, over a named group.

    Its backward sends gradients back to the senders.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        """Send `sent[i]` rows of `rows` (sum(sent), D) to rank i. Returns the received rows (sum(received), D)."""
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradient of the received rows back. Returns the gradient of `rows`, (sum(sent), D)."""
        return all_to_all(grad.contiguous(), ctx.sent, ctx.received, ctx.group), None, None, None


@dataclass(frozen=True)
class _Route:
    """State with which `combine` undoes a `dispatch`.

    - `sent`, `received`: the numbers of rows sent to and received from each rank.
    - `to_sender_order_P`: indices that put the received rows back into the order of their senders.
    """

    sent: list[int]
    received: list[int]
    to_sender_order_P: Tensor


class ExpertExchange:
    """Sends rows to the ranks of their experts, over a named group of `size` ranks, and sends the results back."""

    def __init__(self, size: int, group: str) -> None:
        self.size = size
        self.group = group

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, _Route]:
        """Send each row of `rows_RD`, sorted by expert, to its expert.

        `counts_E` (int64) has the number of rows of each expert.

        Returns three values: the received rows, sorted by local expert; for each local expert, the index at which its
        rows end (int32); and the state for `combine`.
        """
        num_local = counts_E.shape[0] // self.size
        even = [num_local] * self.size
        counts_WL = all_to_all(counts_E, even, even, self.group).view(self.size, num_local)
        # `sent[i]` and `received[i]` are the numbers of rows for rank i and from rank i.
        splits_2W = torch.cat([counts_E.view(self.size, num_local).sum(1), counts_WL.sum(1)])
        splits = splits_2W.to("cpu").tolist()  # one copy for both: on CUDA each one blocks the host
        sent, received = splits[: self.size], splits[self.size :]
        rows_PD = AllToAll.apply(rows_RD, received, sent, self.group)  # type: ignore[no-untyped-call]

        # Received rows are W * L runs, by sender and then expert. So a row's expert is the index of its run modulo L.
        ends_WL = counts_WL.flatten().cumsum(0)
        row_P = torch.arange(rows_PD.shape[0], device=rows_RD.device)
        expert_P = torch.searchsorted(ends_WL, row_P, right=True) % num_local
        # Stable, so that an expert's rows stay in the order of their senders.
        to_expert_order_P = torch.argsort(expert_P, stable=True)
        to_sender_order_P = torch.argsort(to_expert_order_P)
        ends_L = counts_WL.sum(0).cumsum(0).to(torch.int32)
        return rows_PD[to_expert_order_P], ends_L, _Route(sent, received, to_sender_order_P)

    def combine(self, rows_PD: Tensor, route: _Route) -> Tensor:
        """Send the experts' results back. Returns rows (R, D) in the order of the rows that `dispatch` took."""
        rows_PD = rows_PD[route.to_sender_order_P]
        return AllToAll.apply(rows_PD, route.sent, route.received, self.group)  # type: ignore[no-untyped-call]


class CapacityExchange:
    """Exchanges rows as `ExpertExchange`, but each expert accepts at most C of each rank's rows.

    - C is `capacity` times an expert's even share of the rank's rows in this call, rounded up.
    - Rows above C are dropped, and their results are zeros. If a rank has fewer than C rows, it fills them up with
      zeros.

    So no tensor's size depends on the data, and the host never waits for a count.
    """

    limits_rows = True

    def __init__(self, size: int, group: str, capacity: float) -> None:
        self.size = size
        self.group = group
        # As written in decimals: the float 1.1 is a little more than 11 / 10, and could round up to a slot more.
        self.capacity = Fraction(str(capacity))

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, _Slots]:
        """Send at most C rows of `rows_RD`, which are sorted by expert, to each expert. C is the expert's capacity.

        `counts_E` (int64) has each expert's number of rows. Returns three values:

        - The received rows: C for each local expert and sender, sorted by local expert.
        - For each local expert, the index in these rows at which its rows end (int32).
        - The state for `combine`.
        """
        num_experts = counts_E.shape[0]
        # Rounded up, in integers.
        num_slots = -(-rows_RD.shape[0] * self.capacity.numerator // (num_experts * self.capacity.denominator))
        ends_E = counts_E.cumsum(0)
        starts_E = ends_E - counts_E
        row_R = torch.arange(rows_RD.shape[0], device=rows_RD.device)
        slot_C = torch.arange(num_slots, device=rows_RD.device)
        # Index 0 is a row of zeros.
        row_EC = (starts_E.unsqueeze(1) + slot_C + 1) * (slot_C < counts_E.unsqueeze(1))
        # The inverse, for `combine`: each row's slot, counted from 1, or 0 for a dropped row.
        expert_R = torch.searchsorted(ends_E, row_R, right=True)
        place_R = row_R - starts_E[expert_R]
        slot_R = (expert_R * num_slots + place_R + 1) * (place_R < num_slots)

        sent_WLCD = _after_zeros(rows_RD)[row_EC.flatten()].view(self.size, -1, num_slots, rows_RD.shape[1])
        rows_LWCD = self._exchange(sent_WLCD).transpose(0, 1)
        # An expert's slots are all computed, whether used or not, so their ends do not depend on data.
        ends_L = torch.arange(1, rows_LWCD.shape[0] + 1, dtype=torch.int32, device=rows_RD.device)
        ends_L = ends_L * (self.size * num_slots)
        return rows_LWCD.flatten(0, 2), ends_L, _Slots(num_slots, slot_R)

    def combine(self, rows_PD: Tensor, slots: _Slots) -> Tensor:
        """Send the experts' results back. Returns rows (R, D) in the order of the rows that `dispatch` took.

        Dropped rows are zeros.
        """
        rows_LWCD = rows_PD.view(-1, self.size, slots.number, rows_PD.shape[1])
        rows_WLCD = self._exchange(rows_LWCD.transpose(0, 1).contiguous())
        # A dropped row has index 0, the row of zeros.
        return _after_zeros(rows_WLCD.flatten(0, 2))[slots.of_R]

    def _exchange(self, rows_WLCD: Tensor) -> Tensor:
        """Send `rows_WLCD[i]` to rank i of the group. Element i of the result is from rank i."""
        even = [rows_WLCD.shape[1] * rows_WLCD.shape[2]] * self.size
        sent = rows_WLCD.flatten(0, 2)
        received: Tensor = AllToAll.apply(sent, even, even, self.group)  # type: ignore[no-untyped-call]
        return received.view(rows_WLCD.shape)


@dataclass(frozen=True)
class _Slots:
    """State with which `combine` undoes a `dispatch`.

    - `number`: C, the number of slots that an expert has for each rank's rows.
    - `of_R`: the slot of each row, counted from 1 over all slots that the rank sends; 0 for a dropped row.
    """

    number: int
    of_R: Tensor


def _after_zeros(rows_RD: Tensor) -> Tensor:
    return torch.cat([rows_RD.new_zeros(1, rows_RD.shape[1]), rows_RD])
