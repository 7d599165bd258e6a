"""Runs an eager model in pipeline stages, by torch.distributed.pipelining.

A rank keeps the layers of its own stages, under their names in the whole model. For each micro-batch, a stage computes
the same values as the whole model. Each parameter's gradients are reduced over ranks, and then added in the order of
micro-batches.

B batch of a micro-batch, S sequence, D model dim, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bitproof.harness.case import Case, stage_of_layer
from bitproof.harness.errors import CaseError
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.layers.decoder import Decoder
from bitproof.reference.loss import cross_entropy
from bitproof.reference.parallel.fsdp import LocalSums
from bitproof.reference.parallel.mesh import PIPELINE, Mesh, pipeline_group


def stages_of(case: Case, mesh: Mesh) -> list[int]:
    """Return the indices of this rank's stages, in order.

    For example, of 4 stages on 2 ranks, the second rank has stages 1 and 3 in a loop, and 1 and 2 in a V.
    """
    return case.stage_map.stages_of(mesh.coordinate(PIPELINE))


def stage_of(name: str, num_layers: int, num_stages: int) -> int:
    """Return the index of the stage with the module or parameter `name` of a decoder."""
    root, _, below = name.partition(".")
    if root == "layers":
        return stage_of_layer(int(below.partition(".")[0]), num_layers, num_stages)
    return 0 if root == "tok_embeddings" else num_stages - 1


def keep_stages(model: Decoder, kept: Sequence[int], num_stages: int) -> None:
    """Remove from a model, in place, all modules that are not in the stages `kept`.

    The first stage has the embeddings, the last the final norm and the projection. Raises CaseError if there are more
    stages than layers.
    """
    if num_stages > model.num_layers:
        raise CaseError(
            "the model has too few layers for the stages of its pipeline",
            expected=f"{num_stages} layers or more, one for each stage",
            found=f"{model.num_layers} layers",
            fix="choose fewer stages, or more layers (model.layers)",
        )
    own: Any = model
    # Unlike a ModuleList, a ModuleDict keeps the layers' names when earlier layers are removed.
    own.layers = nn.ModuleDict({str(layer): block for layer, block in enumerate(model.layers)})
    for name in ("tok_embeddings", "norm", "output", *(f"layers.{layer}" for layer in own.layers)):
        if stage_of(name, model.num_layers, num_stages) in kept:
            continue
        if name.startswith("layers."):
            del own.layers[name.removeprefix("layers.")]
        else:
            setattr(own, name, None)


class StageModule(nn.Module):
    """The modules of a pipeline stage, taken from a model from which `keep_stages` has removed all others.

    The first stage takes tokens, and the last returns logits. Other inputs and outputs are activations.
    """

    def __init__(self, model: Any, stage: int, num_stages: int) -> None:
        super().__init__()
        self.embeddings = model.tok_embeddings if stage == 0 else None
        own = (
            x for name, x in model.layers.items() if stage_of_layer(int(name), model.num_layers, num_stages) == stage
        )
        self.blocks = nn.ModuleList(own)
        is_last = stage == num_stages - 1
        self.norm = model.norm if is_last else None
        self.output = model.output if is_last else None

    def forward(self, x: Tensor, positions_BS: Tensor) -> Tensor:
        # `x` has tokens (B, S) in the first stage, and otherwise an activation (B, S, D).
        x_BSD = x if self.embeddings is None else self.embeddings(x)
        for block in self.blocks:
            x_BSD = block(x_BSD, positions_BS, None)
        if self.norm is None or self.output is None:
            return x_BSD
        logits_BSV: Tensor = self.output(self.norm(x_BSD))
        return logits_BSV


class StagedGradients:
    """Computes the loss and the gradients of a rank's stages. All ranks must construct it, and call it, together."""

    def __init__(self, model: Any, case: Case, mesh: Mesh) -> None:
        from torch.distributed import pipelining  # imported late: cases without a pipeline do not need it

        assert case.schedule is not None, "Case refuses a pipeline without a schedule"
        self._parameters = dict(model.named_parameters())
        self._seed = case.gradient_seed
        self._losses: list[Tensor] = []
        self._reduces_once = case.schedule.reductions_once
        self._own = stages_of(case, mesh)
        self._num_stages, group = case.stages, pipeline_group(mesh)
        rows, config = case.batch.sequences // case.micro_batches, model.config
        compute = getattr(torch, case.precision.compute)

        def example(stage: int) -> Tensor:
            if stage == 0:
                return torch.empty(rows, case.batch.seq_len, dtype=torch.int64, device="meta")
            # The last stage's output is described as the input of a stage behind it: logits.
            width = config.vocab_size if stage == self._num_stages else config.dim
            shape = (rows, case.batch.seq_len, width)
            return torch.empty(shape, dtype=compute, device="meta", requires_grad=True)

        stages: list[Any] = [
            pipelining.PipelineStage(
                StageModule(model, stage, self._num_stages),
                stage,
                self._num_stages,
                mesh.device,
                input_args=example(stage),
                output_args=example(stage + 1),
                group=group,
            )
            for stage in self._own
        ]
        # torch must not scale gradients: `_loss` already gives each micro-batch its weight.
        settings: Any = {"n_microbatches": case.micro_batches, "loss_fn": self._loss, "scale_grads": False}
        v_orders: Any = {"zbv": pipelining.ScheduleZBVZeroBubble, "dual_pipe_v": pipelining.ScheduleDualPipeV}
        if case.schedule.order in v_orders:
            self._schedule: Any = v_orders[case.schedule.order](stages, **settings)
        elif len(stages) > 1:
            self._schedule = pipelining.ScheduleInterleaved1F1B(stages, **settings)
        else:
            # zero_bubble divides a backward, and takes micro-batches in the order of 1F1B.
            kind: Any = pipelining.ScheduleGPipe if case.schedule.order == "gpipe" else pipelining.Schedule1F1B
            self._schedule = kind(*stages, **settings)

    def __call__(self, inputs: StepInputs) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return a pair: this rank's mean loss, and parameter name -> gradient.

        The loss is None except on the last stage's rank.
        """
        self._losses.clear()
        # torch expects tokens only on the rank of the first stage, and labels only on that of the last.
        tokens = (inputs.tokens_BS,) if 0 in self._own else ()
        target = inputs.labels_BS if self._num_stages - 1 in self._own else None
        with LocalSums() if self._reduces_once else nullcontext() as sums:
            self._schedule.step(*tokens, target=target, positions_BS=inputs.positions_BS, return_outputs=False)
        gradients: dict[str, Any] = {name: parameter.grad for name, parameter in self._parameters.items()}
        if sums is not None:
            gradients = dict(sums.reduced(self._parameters))
        # The schedule adds into `grad`, so it must be empty before the next step.
        for parameter in self._parameters.values():
            parameter.grad = None
        return mean_of_losses(self._losses) if self._losses else None, gradients

    def _loss(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        # torch starts backward from a gradient of 1, so the weight is put into the loss.
        loss = cross_entropy(logits_BSV, labels_BS)
        self._losses.append(loss.detach())
        return loss * self._seed


def mean_of_losses(losses: Sequence[Tensor]) -> Tensor:
    # Added in the order of micro-batches.
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total / len(losses)


def micro_batches_of(inputs: StepInputs, number: int) -> list[StepInputs]:
    return [StepInputs(*parts) for parts in zip(*(x.chunk(number) for x in inputs), strict=True)]
