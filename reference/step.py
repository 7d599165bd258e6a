"""An eager training step: loss and gradients, then the balancing of experts, then the optimizer.

`Trainer` has a rank's shards, optimizer and data. Another system may replace its computation of loss and gradients, for
example by a compiled graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from bitproof.harness.case import ADVERSARIAL, Case, Kind, Model
from bitproof.harness.errors import CaseError
from bitproof.reference.chunking import ChunkedModules, Inspect, chunk_modules, running_chunk
from bitproof.reference.data import DOCUMENT_START, TextStream, text_source
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.gradient_norm import gradient_norm
from bitproof.reference.init import spread_biases
from bitproof.reference.layers.document_mask import document_mask, document_offsets
from bitproof.reference.layers.moe import MoE
from bitproof.reference.loss import cross_entropy
from bitproof.reference.models import build_model
from bitproof.reference.observed_activations import Activations
from bitproof.reference.optimizer import ShardedAdamW, balance_experts, layers_with_experts
from bitproof.reference.parallel.expert import CapacityExchange, ExpertExchange
from bitproof.reference.parallel.fsdp import LocalSums, fully_shard, placement_hash, shardings_of
from bitproof.reference.parallel.mesh import EXPERT, FSDP, Mesh
from bitproof.reference.parallel.tensor import split_layers
from bitproof.reference.pipeline_stages import StagedGradients, keep_stages, mean_of_losses, micro_batches_of, stages_of
from bitproof.reference.tied_stages import Join, JoinTied, copies_of, share_parameters

Observe = Callable[[Kind, str, Tensor], None]


GradientFunction = Callable[[StepInputs], tuple[Tensor | None, dict[str, Tensor]]]
"""Computes (loss, gradients by name) from a rank's input.

The loss is None on a rank without the last pipeline stage.
"""
WrapGradients = Callable[[GradientFunction], GradientFunction]
ShownTo = Callable[[Observe], AbstractContextManager[None]]


def mean_loss(model: nn.Module, form: Model, inputs: StepInputs) -> Tensor:
    """Run the model on this rank's input, with the attention mask that `form` needs, and return the mean loss.

    `form` is the case's description of the model. Eager runs this function, and graphs trace it.
    """
    masks: BlockMask | Tensor | None = None
    if form.folded:
        masks = document_offsets(inputs.positions_BS)
    elif form.attention == "flex":
        masks = document_mask(inputs.tokens_BS == DOCUMENT_START)
    # In pieces the model computes the loss itself, so that the logits of all tokens never exist together.
    if form.loss_pieces > 1:
        loss: Tensor = model(inputs.tokens_BS, inputs.positions_BS, masks, inputs.labels_BS, form.loss_pieces)
        return loss
    return cross_entropy(model(inputs.tokens_BS, inputs.positions_BS, masks), inputs.labels_BS)


def loss_and_gradients(
    model: nn.Module,
    form: Model,
    inputs: StepInputs,
    gradient_seed: float,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a pair: this rank's mean loss (float32, scalar), and parameter name -> gradient of this rank's shard.

    - `gradient_seed`: the gradient of the loss, such as 1 / D for a mean over D ranks.
    - `parameters`: the model's parameters by name, if the caller has them: that saves a walk over all modules.
    """
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    loss = mean_loss(model, form, inputs)
    seed = torch.full_like(loss, gradient_seed)
    gradients = torch.autograd.grad(loss, list(parameters.values()), seed)
    return loss, dict(zip(parameters, gradients, strict=True))


def build_sharded_model(
    case: Case, mesh: Mesh, device: torch.device, stages: Sequence[int] | None = None, *, shares: bool = False
) -> nn.Module:
    """Build this rank's part of the case's model, with its initial values.

    - `stages`: the pipeline stages whose modules are kept; None for the whole model.
    - `shares`: True if the case's shared modules use the same parameters. Otherwise each has a copy.

    Raises CaseError if autoplace has not yet chosen the placements, and for sizes that the ranks cannot divide.
    """
    with torch.device(device):
        model: Any = build_model(case.model)
    # `share_parameters` needs a whole model, so it precedes the removal of other stages.
    if shares:
        share_parameters(model, case)
    if stages is not None:
        keep_stages(model, stages, case.stages)
    for module in model.modules():
        if isinstance(module, MoE):
            capacity, size = module.config.capacity, mesh.size(EXPERT)
            module.experts.exchange = (
                ExpertExchange(size, EXPERT) if capacity is None else CapacityExchange(size, EXPERT, capacity)
            )
    spread = case.batch.data == ADVERSARIAL
    # The tokens in a call of a layer: those of a micro-batch, or of a chunk.
    num_tokens = math.prod(case.input_shape) // (2 if case.chunking else 1)
    plan = case.autoplace.plan if case.autoplace else None
    if case.autoplace and plan is None:
        raise CaseError(
            f"case {case.name} has no plan of its placements yet",
            expected="a plan: commands that run cases have one solved first, and a case may state its own",
            found="autoplace.plan=None",
        )
    # Tensor parallelism comes first: `fully_shard` shards each rank's part of a split parameter.
    dims = split_layers(model, mesh, num_tokens, plan.split if plan else None)
    replicated = plan.replicated if plan else ()
    # Both copies of a shared parameter start with the values of the first.
    values_of = copies_of(case, [name for name, _ in model.named_parameters(remove_duplicate=not shares)])
    fully_shard(
        model,
        mesh,
        case.precision,
        case.seed,
        device,
        dims,
        spread=spread,
        replicated=replicated,
        values_of=values_of,
    )
    # `fully_shard` writes values into parameters only, and these biases are buffers.
    if spread:
        spread_biases(model, case.seed)
    return model


class _NoInitialValues(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # On the meta device an initialization has no effect, but imports torch's compiler, which takes a second.
        if getattr(function, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def num_records_per_step(case: Case) -> dict[Kind, int]:
    """Return kind -> number of records in a step of a built-in system, over all ranks. Activations are not counted."""
    with torch.device("meta"), _NoInitialValues():
        model = build_model(case.model)
    state = model.state_dict()
    world, ranks = case.parallelism.world_size, case.parallelism.stage_ranks
    # Every rank of a stage has a part of each of the stage's parameters.
    parameters = ranks * len(list(model.parameters()))
    # Only the ranks of the last stage record the loss. AdamW keeps two moments and a step count for each part.
    counts: dict[Kind, int] = {"loss": ranks, "grad": parameters, "param": parameters, "optimizer": 3 * parameters}
    # A buffer with state is recorded before and after the update.
    counts["buffer"] = ranks * 2 * sum(name in state for name, _ in model.named_buffers())
    return counts | ({"grad_norm": world} if case.grad_norm else {})


class Trainer:
    """A rank of a training run. `step` computes a training step, and passes these values to `observe`, in this order:

    1. If the case observes activations: each activation, as soon as it is computed.
    2. The loss.
    3. Every local gradient, and, if the case asks for it, the norm of all gradients.
    4. Every buffer that training changes, as `<name>@before_optimizer`.
    5. After the update: every local parameter, the optimizer's state, and the buffers again, as
       `<name>@after_optimizer`.

    With `is_whole`, a rank has the whole model, even if the case has pipeline stages.
    """

    def __init__(self, case: Case, mesh: Mesh, device: torch.device, *, is_whole: bool = False) -> None:
        self.case = case
        self.mesh = mesh
        self.device = device
        is_cut = case.parallelism.pp > 1 and not is_whole
        self.model = build_sharded_model(case, mesh, device, stages_of(case, mesh) if is_cut else None)
        self.parameters = dict(self.model.named_parameters())
        # Only buffers that training changes; constant tables are not state.
        self.state_buffers = {
            name: buffer for name, buffer in self.model.named_buffers() if name in self.model.state_dict()
        }
        self.optimizer = ShardedAdamW(self.parameters, case.optimizer)
        self.layers_with_experts = layers_with_experts(self.model)
        documents, self.data_sha256 = text_source(case.batch.data)
        data_ranks = mesh.parallelism.data_ranks
        self.data = TextStream(
            documents, case.batch, rank=mesh.coordinate(FSDP), world_size=data_ranks, folded=case.model.folded
        )
        self.gradients: GradientFunction = self.eager_gradients
        self.activations_shown_to: ShownTo = Activations(self.model, case.observe).shown_to
        self.join_tied: Join = JoinTied(case, mesh, self.parameters, int(self.model.num_layers), is_cut)  # type: ignore[arg-type]
        self.graph: Any = None  # the graph that `gradients` runs, if any
        self.chunks: ChunkedModules | None = None  # the modules that eager runs in chunks
        self.chunked: dict[str, int] | None = None
        """Module name -> how often a step runs it in chunks.

        None before the first step, and without chunked modules.
        """

    @staticmethod
    def running_chunk() -> int | None:
        return running_chunk()

    def running_half(self) -> tuple[str, int] | None:
        """Return (half, micro-batch) of the pipeline graph that runs now, such as ("forward", 0); None if none runs."""
        action = getattr(self.graph, "running", None)
        return None if action is None else (action.half, action.micro_batch)

    def eager_gradients(self, inputs: StepInputs) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Compute loss and gradients by eager autograd. Returns a pair: the loss, and parameter name -> gradient.

        Gradients of micro-batches are added in order.
        """
        form, seed = self.case.model, self.case.gradient_seed
        if self.case.schedule is None:
            return loss_and_gradients(self.model, form, inputs, seed, self.parameters)
        if self.case.schedule.reductions_once:
            return self._reduced_once(inputs)
        losses, totals = [], dict[str, Tensor]()
        for part in micro_batches_of(inputs, self.case.micro_batches):
            loss, gradients = loss_and_gradients(self.model, form, part, seed, self.parameters)
            losses.append(loss.detach())
            totals = {name: totals[name] + x if name in totals else x for name, x in gradients.items()}
        return mean_of_losses(losses), totals

    def _reduced_once(self, inputs: StepInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss and gradients as `eager_gradients`, but add gradients on each rank before they are reduced."""
        losses = []
        with LocalSums() as sums:
            for part in micro_batches_of(inputs, self.case.micro_batches):
                loss = mean_loss(self.model, self.case.model, part)
                losses.append(loss.detach())
                loss.backward(torch.full_like(loss, self.case.gradient_seed))
        return mean_of_losses(losses), sums.reduced(self.parameters)

    def step(self, index: int, observe: Observe) -> None:
        """Take training step `index`, counted from 0. `observe` gets every value as soon as it is computed."""
        inputs = StepInputs(*(x.to(self.device) for x in self.data.step(index)))
        with self.activations_shown_to(observe):
            loss, gradients = self.gradients(inputs)
        if self.chunks is not None:
            self.chunked = self.chunks.end_step(index)
        gradients = self.join_tied(gradients)
        if loss is not None:
            observe("loss", "loss", loss.detach())
        _observe_all(observe, "grad", gradients)
        if self.case.grad_norm:
            observe("grad_norm", "grad_norm", gradient_norm(gradients, shardings_of(self.model), self.mesh))
        # Recorded now, since the update resets the token counts.
        self._observe_buffers(observe, "before_optimizer")
        self.update(gradients)
        _observe_all(observe, "param", self.parameters)
        _observe_all(observe, "optimizer", dict(self.optimizer.state()))
        self._observe_buffers(observe, "after_optimizer")

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        balance_experts(self.layers_with_experts, self.case.optimizer.expert_bias_lr)
        self.optimizer.step(gradients)

    def _observe_buffers(self, observe: Observe, moment: str) -> None:
        _observe_all(observe, "buffer", {f"{name}@{moment}": x for name, x in self.state_buffers.items()})

    def manifest(self) -> dict[str, Any]:
        """Return the hash of the data and, if autoplace chose the placements, the hash of the placements.

        With the case, these facts determine this rank's numbers.
        """
        placed = {"placement_sha256": placement_hash(self.model)} if self.case.autoplace else {}
        return {"data_sha256": self.data_sha256, **placed}


def _observe_all(observe: Observe, kind: Kind, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        observe(kind, name, tensor.detach() if tensor.requires_grad else tensor)


def make_eager(
    case: Case,
    mesh: Mesh,
    device: torch.device,
    chunked: bool,
    wrap: WrapGradients,
    inspect_module: Inspect | None = None,
) -> Trainer:
    """Make the trainer of the system `eager` or, with `chunked`, of `eager_chunked`.

    - `wrap`: takes the function that computes loss and gradients, and returns the function that replaces it.
    - `inspect_module`: as for `chunk_modules`.
    """
    trainer = Trainer(case, mesh, device)
    if chunked:
        assert case.chunking is not None, "Case refuses eager_chunked without chunking"
        trainer.chunks = chunk_modules(trainer.model, case.chunking, inspect_module, folded=case.model.folded)
    if case.parallelism.pp > 1:
        trainer.gradients = StagedGradients(trainer.model, case, mesh)
    # Last, so that `wrap` also gets the function of a pipeline.
    trainer.gradients = wrap(trainer.gradients)
    return trainer
