"""The projection to the vocabulary, and the loss over it in pieces.

A step with pieces never has the logits of all tokens in memory. Each piece of tokens goes through projection, cross
entropy and both gradients before the next piece begins:

    for each piece      logits = x W^T;  loss = mean cross entropy / P;  gradients of x and W
    loss                (piece 0 + piece 1) + piece 2 ...
    gradient of W       the same sum, in float32, rounded once to W's dtype
    gradient of x       the pieces' gradients, one after another

Backward only multiplies these gradients by the gradient of the loss.

T tokens, P pieces, t tokens of a piece (T / P), D model dim, V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Output(nn.Linear):
    """Projects hidden states to logits. With labels, it returns the mean cross entropy instead."""

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None = None, pieces: int = 1) -> Tensor:
        """Return logits_BSV. With labels, return the mean cross entropy instead, as a float32 scalar.

        The loss is computed in `pieces` equal pieces of adjacent tokens.
        """
        if labels_BS is None:
            return functional.linear(x_BSD, self.weight)
        loss: Tensor = _LossInPieces.apply(x_BSD.flatten(0, -2), self.weight, labels_BS.flatten(), pieces)  # type: ignore[no-untyped-call]
        return loss


class _LossInPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, pieces: int) -> Tensor:
        x_PtD, labels_Pt = (x.unflatten(0, (pieces, -1)).unbind(0) for x in (x_TD, labels_T))
        loss, grad_VD, grads_PtD = None, None, []
        for x_tD, labels_t in zip(x_PtD, labels_Pt, strict=True):
            own, grad_tD, own_VD = _loss_and_gradients(x_tD, weight_VD, labels_t, pieces)
            loss = own if loss is None else loss + own
            # Added in float32, and rounded to the weight's dtype only at the end.
            grad_VD = own_VD.float() if grad_VD is None else grad_VD + own_VD.float()
            grads_PtD.append(grad_tD)
        assert loss is not None and grad_VD is not None
        # A trace with an open size writes P pieces of it as P * (T // P), and has to read T.
        ctx.save_for_backward(torch.cat(grads_PtD).expand(x_TD.shape), grad_VD.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_TD, grad_VD = ctx.saved_tensors
        return grad_TD * grad, grad_VD * grad, None, None


def _loss_and_gradients(
    x_tD: Tensor, weight_VD: Tensor, labels_t: Tensor, pieces: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors: a piece's share of the mean loss, and the gradients of this share for x and for W.

    The share is the piece's own mean, divided by `pieces`. The gradient of logits is rounded to x's dtype.
    """
    logs_tV = functional.linear(x_tD, weight_VD).float().log_softmax(-1)
    labelled_tV = torch.zeros_like(logs_tV).scatter(1, labels_t.unsqueeze(1), 1.0)
    grad_tV = ((logs_tV.exp() - labelled_tV) / labels_t.shape[0] / pieces).to(x_tD.dtype)
    return functional.nll_loss(logs_tV, labels_t) / pieces, grad_tV @ weight_VD, grad_tV.t() @ x_tD
