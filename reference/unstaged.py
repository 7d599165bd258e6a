"""A pipeline's step without stages, for comparison: what the stages of a model must come to.

    bitproof.reference.unstaged:eager    as eager, but the ranks of each stage train the whole model, among themselves

Nothing is sent from stage to stage: ranks of one place in different stages read the same text and compute the same. A
rank shows what its stages would: their parameters, and the loss in the last stage.
"""

from __future__ import annotations

from torch import Tensor

from bitproof.harness.case import Case, Kind
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.pipeline_stages import stage_of, stages_of
from bitproof.reference.step import Observe, Trainer


class Unstaged(Trainer):
    """A trainer that takes micro-batches through the whole model, and shows a rank's own stages."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        super().__init__(case, mesh, mesh.device, is_whole=True)
        self.independent_ranks = case.parallelism.stage_ranks == 1
        self._own = stages_of(case, mesh)
        self._num_layers: int = self.model.num_layers  # type: ignore[assignment]

    def step(self, index: int, observe: Observe) -> None:
        """As `Trainer.step`."""

        def observe_own(kind: Kind, name: str, tensor: Tensor) -> None:
            if stage_of(name, self._num_layers, self.case.stages) in self._own:  # the loss is the last stage's
                observe(kind, name, tensor)

        super().step(index, observe_own)


def eager(case: Case, mesh: Mesh) -> Unstaged:
    """The system."""
    return Unstaged(case, mesh)
