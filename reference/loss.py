"""The training loss.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross entropy in nats over all tokens: a float32 scalar, computed in float32 from logits of any dtype.

    Folded tokens have one dim in place of B and S. Logits of another shape may give other bits.
    """
    return functional.cross_entropy(logits_BSV.float().flatten(0, -2), labels_BS.flatten())
