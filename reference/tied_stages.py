"""One parameter in two stages: the embeddings of the first and the projection to logits of the last.

Each of the two stages has a copy, as in Megatron-LM. Both begin with the same values. A copy's gradient is that of its
own use: over micro-batches it is added as any other. Once a step the stages exchange these sums, and both add the
embeddings' first. So the copies get equal gradients, and stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from bitproof.reference.parallel.mesh import PIPELINE, Mesh, pipeline_group

EMBEDDINGS, PROJECTION = "tok_embeddings.weight", "output.weight"


class JoinTied:
    """Adds the gradients of both copies. All ranks construct it together; `is_cut`: a rank has its own stages alone."""

    def __init__(self, mesh: Mesh, is_cut: bool) -> None:
        self._group = pipeline_group(mesh) if is_cut else None
        self._coordinate = mesh.coordinate(PIPELINE)
        self._last = mesh.size(PIPELINE) - 1

    def __call__(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients, those of a rank's copies replaced by the sum."""
        names = [name for name in (EMBEDDINGS, PROJECTION) if name in gradients]
        own = [gradients[name] for name in names]
        if len(own) == 1:
            own = self._exchanged(own[0].contiguous())
        return {**gradients, **{name: own[0] + own[1] for name in names}}

    def _exchanged(self, own: Tensor) -> list[Tensor]:
        """The embeddings' gradient and the projection's, of this rank's shard. The first stage sends first."""
        other = torch.empty_like(own)
        if self._coordinate == 0:
            dist.send(own, group=self._group, group_dst=self._last)
            dist.recv(other, group=self._group, group_src=self._last)
            return [own, other]
        dist.recv(other, group=self._group, group_src=0)
        dist.send(own, group=self._group, group_dst=0)
        return [other, own]
