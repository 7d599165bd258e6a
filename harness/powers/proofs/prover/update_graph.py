"""Traces the update that follows a step's gradients, as a graph.

The update balances the load of experts, and runs the optimizer. All built-in systems run the same update.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen

from bitproof.harness.case import Case
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.graph.tracing.trace import fixed_fake
from bitproof.harness.powers.proofs.prover.programs.one_by_one import one_by_one, without_regions
from bitproof.harness.torch_compat import FakeTensorMode, swapped_state, symbolic_graph
from bitproof.reference.optimizer import ShardedAdamW, layers_with_experts
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import Trainer, build_sharded_model


class UpdateGraph(NamedTuple):
    """The traced update. `module` is a graph that writes its inputs and returns nothing.

    The other fields are the inputs of `module`, in order: name -> fake tensor with the layout of the real tensor.
    """

    module: GraphModule
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def update_graph(case: Case, gradients: Mapping[str, Tensor], device: torch.device) -> UpdateGraph:
    """Trace `Trainer.update`. `gradients` maps each parameter's name to a tensor with the layout of its gradient.

    The optimizer is traced as in a second step, when its state exists. Raises the errors of the update.
    """
    model = build_sharded_model(case, Mesh(0, case.parallelism), torch.device("meta"))
    mode = step_fake_mode(ShapeEnv())
    parameters = {name: fixed_fake(mode, x, device) for name, x in model.named_parameters()}
    buffers = {name: fixed_fake(mode, x, device) for name, x in model.named_buffers()}
    given = {name: fixed_fake(mode, x, device) for name, x in gradients.items()}
    # In the first step the state is zeros, which a trace would record as constants.
    state = _state(case, mode, parameters, given)

    def update(*tensors: dict[str, Tensor]) -> list[Tensor]:
        own, held, grads, kept = tensors
        optimizer = ShardedAdamW(own, case.optimizer)  # type: ignore[arg-type]
        optimizer.load(kept)
        with swapped_state(model, own | held), one_by_one():
            layers = layers_with_experts(model)
            # `Trainer.update` reads no other attributes. A real trainer would load its data, too.
            trainer = types.SimpleNamespace(case=case, optimizer=optimizer, layers_with_experts=layers)
            Trainer.update(trainer, grads)  # type: ignore[arg-type]
        return []

    module = without_regions(symbolic_graph(update, mode)(parameters, buffers, given, state))
    # The module takes its tensors one by one, and not in the dicts of `update`.
    module.graph.set_codegen(CodeGen())
    module.recompile()
    return UpdateGraph(module, parameters, buffers, given, state)


def _state(
    case: Case, mode: FakeTensorMode, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    with mode:
        optimizer = ShardedAdamW(parameters, case.optimizer)  # type: ignore[arg-type]
        optimizer.step(gradients)
    # New fakes, whose values torch does not know: a known step count would become a constant of the graph.
    return {name: fixed_fake(mode, x, x.device) for name, x in optimizer.state()}
