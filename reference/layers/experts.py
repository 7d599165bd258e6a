"""The routed experts: many SwiGLU layers as three grouped matrix products.

An exchange sends rows to the experts' ranks.

R routed rows (T tokens times K experts of each token), sorted by expert; r rows of local experts; E experts, e local
experts, D model dim, F hidden dim
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate
from torch.nn import functional

DISPATCH, COMPUTE, COMBINE = {"EP": "dispatch"}, {"EP": "compute"}, {"EP": "combine"}
"""Annotations of torch that name the running part of a mixture, with the same key as in torchtitan 0.3.0."""


KEEPS_ROWS = {"keeps rows": True}
"""An annotation of code that returns a row for each row that it gets, in the same order; see
harness/graph/origin.py.
"""


class Exchange(Protocol):
    """Sends routed rows to the ranks with their experts, and sends the results back.

    If an attribute `limits_rows` is true, an expert takes a limited number of rows per call. The results of other rows
    are zeros.
    """

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Send rows to their experts.

        `rows_RD` is sorted by expert; `counts_E` (int64) has the number of rows of each expert.

        Returns three values: the received rows, sorted by local expert; for each local expert, the index at which its
        rows end (int32); and the state for `combine`.
        """
        ...

    def combine(self, rows_rD: Tensor, state: Any) -> Tensor:
        """Send results back. Returns rows_RD in the order of the rows that `dispatch` took."""
        ...


class LocalExchange:
    """The exchange of a rank that has all experts: it returns the rows unchanged."""

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, None]:
        return rows_RD, counts_E.cumsum(0).to(torch.int32), None

    def combine(self, rows_rD: Tensor, state: None) -> Tensor:
        return rows_rD


class Experts(nn.Module):
    """Computes w2(silu(w1(x)) * w3(x)) of each row, with the weights of the row's expert, in the rows' dtype.

    Weights have the shape (E, out, in). A row of D elements, and one of F elements, must be a multiple of 16 bytes
    long.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        # Grouped products read the transpose without a copy. Under expert parallelism a rank has only some of the
        # experts, so no code here reads their number from a parameter.
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        self.exchange: Exchange = LocalExchange()

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each row's expert. Input and output rows are sorted by expert."""
        # With a limit, the dropped rows depend on all rows of the call.
        with annotate(KEEPS_ROWS if getattr(self.exchange, "limits_rows", False) else {}):
            return self._compute(rows_RD, counts_E)

    def _compute(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        with annotate(DISPATCH):
            rows_rD, ends_e, state = self.exchange.dispatch(rows_RD, counts_E)
        with annotate(COMPUTE):
            gate_rF = functional.grouped_mm(rows_rD, self.w1.transpose(-2, -1), offs=ends_e)
            up_rF = functional.grouped_mm(rows_rD, self.w3.transpose(-2, -1), offs=ends_e)
            hidden_rF = functional.silu(gate_rF) * up_rF
            y_rD = functional.grouped_mm(hidden_rF, self.w2.transpose(-2, -1), offs=ends_e)
        with annotate(COMBINE):
            return self.exchange.combine(y_rD, state)
