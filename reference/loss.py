"""The training loss.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens, in nats, as a float32 scalar.

    Logits of any dtype become float32 first.

    Folded tokens have a single dim instead of B and S. Logits of another shape may give other bits.
    """
    return functional.cross_entropy(logits_BSV.float().flatten(0, -2), labels_BS.flatten())
