"""One expert, on one rank, whose rows are sums taken in an order of chance: put into eager, and into the graph.

A kernel that adds atomically does such a thing. Nobody marks it: it is one operator call among thousands.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.case import Case
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import Trainer, make_eager
from tests.harness.localize.defects import EXPERTS, find, insert

NOISY_RANK = 1
SHARES = [0.1 + 0.05 * i for i in range(16)]


@torch.library.custom_op("bitproof_tests::sum_in_any_order", mutates_args=())
def sum_in_any_order(rows_rD: Tensor, ends_e: Tensor) -> Tensor:
    """The rows; those of the rank's busiest expert are replaced by a sum of their shares, in an order of chance."""
    rows_rD, order = rows_rD.clone(), SHARES[:]
    if dist.get_rank() == NOISY_RANK:
        random.SystemRandom().shuffle(order)
    counts_e = ends_e.diff(prepend=ends_e.new_zeros(1))
    expert = int(counts_e.argmax())
    mine = slice(int(ends_e[expert] - counts_e[expert]), int(ends_e[expert]))
    parts = [rows_rD[mine] * share for share in order]
    rows_rD[mine] = sum(parts[1:], parts[0])
    return rows_rD


@sum_in_any_order.register_fake
def _(rows_rD: Tensor, ends_e: Tensor) -> Tensor:
    return torch.empty_like(rows_rD)


sum_in_any_order.register_autograd(lambda ctx, grad: (grad, None))


class NoisyExchange:
    """An exchange that hands an expert's rows back as noise."""

    def __init__(self, exchange: Any) -> None:
        self.exchange = exchange

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> Any:
        rows_rD, ends_e, state = self.exchange.dispatch(rows_RD, counts_E)
        return rows_rD, ends_e, (ends_e, state)

    def combine(self, rows_rD: Tensor, state: Any) -> Tensor:
        ends_e, state = state
        return self.exchange.combine(torch.ops.bitproof_tests.sum_in_any_order(rows_rD, ends_e), state)


def eager(case: Case, mesh: Mesh) -> Trainer:
    """`eager_chunked`, with the noise on one rank. The others do not make the call at all."""
    trainer = make_eager(case, mesh, torch.device("cpu"), True, lambda gradients: gradients)
    if mesh.rank == NOISY_RANK:
        experts: Any = trainer.model.get_submodule(EXPERTS)
        experts.exchange = NoisyExchange(experts.exchange)
    return trainer


def add_noise(module: GraphModule) -> None:
    """A pass that puts the same into the first chunk. All ranks run one graph, so all make the call."""
    product = find(module, "_grouped_mm", EXPERTS, chunk=0, turn=2)
    insert(product, torch.ops.bitproof_tests.sum_in_any_order.default, product.kwargs.get("offs", product.args[-1]))
