"""Systems that run the step of a pipeline case without stages. A case compares them with the system that has stages.

    bitproof.reference.unstaged:eager            as eager, but each rank trains the whole model
    bitproof.reference.unstaged:eager_chunked    as eager_chunked, but each rank trains the whole model

A rank records only the values of its own stages.
"""

from __future__ import annotations

from torch import Tensor

from bitproof.harness.case import Case, Kind
from bitproof.harness.errors import CaseError
from bitproof.reference.chunking import chunk_modules
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.pipeline_stages import stage_of, stages_of
from bitproof.reference.step import Observe, Trainer


class Unstaged(Trainer):
    """A trainer that runs micro-batches through the whole model, but records only the values of
    this rank's own stages.
    """

    def __init__(self, case: Case, mesh: Mesh) -> None:
        super().__init__(case, mesh, mesh.device, is_whole=True)
        # Stages send each other nothing here, so a stage of a single rank runs alone.
        self.independent_ranks = case.parallelism.stage_ranks == 1
        self._own = stages_of(case, mesh)
        self._num_layers: int = self.model.num_layers  # type: ignore[assignment]

    def step(self, index: int, observe: Observe) -> None:
        def observe_own(kind: Kind, name: str, tensor: Tensor) -> None:
            if stage_of(name, self._num_layers, self.case.stages) in self._own:  # only the last stage records the loss
                observe(kind, name, tensor)

        super().step(index, observe_own)


def eager(case: Case, mesh: Mesh) -> Unstaged:
    return Unstaged(case, mesh)


def eager_chunked(case: Case, mesh: Mesh) -> Unstaged:
    if case.chunking is None:
        raise CaseError(
            f"case {case.name} runs eager_chunked but does not say how to chunk",
            expected="chunking=Chunking(dim=..., modules=...)",
            found="chunking=None",
        )
    trainer = Unstaged(case, mesh)
    trainer.chunks = chunk_modules(trainer.model, case.chunking, folded=case.model.folded)
    return trainer
