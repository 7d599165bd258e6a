"""Computes how a case's parameters are placed on ranks, with a linear program.

1. Keep one layer of each kind; all layers of a kind get the same placement.
2. Trace the step of this smaller model on fake tensors, with unsharded parameters and one rank's batch.
3. Build the linear program, and solve it under the case's memory limit.
4. Apply each traced layer's placement to all layers of its kind.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from bitproof.harness.case import Case, Plan
from bitproof.harness.errors import CaseError
from bitproof.harness.graph.tracing.trace import trace_fixed_step
from bitproof.harness.placement.build import SHARDED, SPLIT, WHOLE, PlacedLayer, PlacedParameter, PlacementInputs, build
from bitproof.harness.placement.problem import PlacementProblem, Taken
from bitproof.harness.placement.solve import MIB, least_bytes, solve
from bitproof.harness.records import Placed, PlacedTensor
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.layers.moe import MoE
from bitproof.reference.layers.rms_norm import RMSNorm
from bitproof.reference.models import build_model
from bitproof.reference.parallel.mesh import EXPERT, EXPERT_FSDP, FSDP, Mesh
from bitproof.reference.parallel.tensor import split_dims
from bitproof.reference.step import mean_loss


@dataclass(frozen=True)
class Traced:
    """A case's placement problem, traced from a smaller model that has a single layer of each kind.

    - `program`: the linear program.
    - `scene`: the layers and parameters of the smaller model.
    - `kinds`: traced layer -> the case's layers of this kind, such as `{"0": ["0", "1"]}`.
    """

    program: PlacementProblem
    scene: PlacementInputs
    kinds: Mapping[str, list[str]]

    def names(self, name: str) -> list[str]:
        """Return the case's names for a name in the smaller model.

        If layers 0 and 1 are of the same kind, `layers.0.wq` stands for `layers.0.wq` and `layers.1.wq`.
        """
        if not name.startswith("layers."):
            return [name]
        _, index, rest = name.split(".", 2)
        return [f"layers.{own}.{rest}" for own in self.kinds[index]]


def place(case: Case) -> tuple[Plan, Placed]:
    """Find the cheapest placements for a case. Return a pair: the plan, and facts about it for the report.

    Raises PlacementError if no plan keeps the memory limit. Raises CaseError, MachineError or TraceError if the model
    cannot be traced or placed.
    """
    assert case.autoplace is not None, "only a case that asks for placements gets some"
    began = time.perf_counter()
    bound = case.autoplace.memory_mib * MIB
    traced = trace_placements(case)
    optimum = solve(traced.program, bound)
    taken, names = optimum.taken, traced.names
    split = [
        name
        for layer in traced.scene.layers
        if _has_choice(traced, taken, layer.name, SPLIT)
        for name in names(layer.name)
    ]
    rows = [_row(traced, taken, parameter) for parameter in traced.scene.parameters]
    whole = {
        name
        for row, parameter in zip(rows, traced.scene.parameters, strict=True)
        if row.data != SHARDED
        for name in names(parameter.name)
    }
    # Only the order of the names is read, so the model needs no values.
    with torch.device("meta"):
        order = [name for name, _ in build_model(case.model).named_parameters()]
    # A fixed order, so that equal plans have equal hashes.
    plan = Plan(split=tuple(sorted(split, key=_by_number)), replicated=tuple(name for name in order if name in whole))
    return plan, Placed(
        source=case.autoplace.source,
        cost=taken.cost,
        bytes=round(taken.bytes),
        bound=round(bound),
        least=round(least_bytes(traced.program)),
        gap=optimum.gap,
        nodes=len(traced.program.nodes),
        edges=len(traced.program.edges),
        variables=optimum.num_variables,
        constraints=optimum.num_constraints,
        seconds=round(time.perf_counter() - began, 3),
        sha256=plan_hash(plan),
        split=list(plan.split),
        parameters=rows,
        beside={name: [found.cost, found.bytes] for name, found in by_hand(traced).items()},
    )


def plan_hash(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(asdict(plan), sort_keys=True).encode()).hexdigest()


def by_hand(traced: Traced) -> dict[str, Taken]:
    """Return name -> (cost, bytes) for two handwritten plans. They need not keep the memory limit.

    - `fsdp`: shards all parameters over the data-parallel ranks.
    - `fsdp and tp`: also splits layers over the tensor-parallel ranks, if possible.
    """
    program, scene = traced.program, traced.scene
    found = {}
    for name, kinds in (("fsdp", (WHOLE, SPLIT)), ("fsdp and tp", (SPLIT, WHOLE))):
        # The index of each layer's choice: the preferred kind, or the other if the layer cannot have it.
        layers = {x.name: x.may_be.index(next(kind for kind in kinds if kind in x.may_be)) for x in scene.layers}
        # All parameters are sharded over data ranks. Over tensor ranks, a parameter is split if its layer is.
        for parameter in scene.parameters:
            # A choice's name is its placement on the data axis and on the tensor axis, such as `S0 R`.
            choices = program.nodes[parameter.name]
            layer = next((x for x in scene.layers if x.name == parameter.layer), None)
            is_split = (
                layer is not None and layer.may_be[layers[layer.name]] == SPLIT and parameter.split_dim is not None
            )
            layers[parameter.name] = next(
                i for i, x in enumerate(choices) if x.name.startswith(SHARDED) and x.name.endswith(" R") != is_split
            )
        # Without a memory limit, as these plans are only compared with the optimum.
        fixed = solve(program.fixed(layers)).taken
        found[name] = fixed
    return found


def trace_placements(case: Case) -> Traced:
    mesh, size = Mesh(0, case.parallelism), case.parallelism.tp
    # The trace reads shapes and dtypes, and no values.
    with torch.device("meta"):
        model = build_model(case.model)
    num_tokens = case.batch.sequences * case.batch.seq_len
    kinds = _keep_one_of_a_kind(model)
    compute, reduce = (getattr(torch, name) for name in (case.precision.compute, case.precision.reduce))
    layers, parameters = _layers_and_parameters(model, mesh, size, num_tokens)
    # The step is traced in the compute dtype, as its activations and gathered parameters have that.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(compute)

    def loss(*tensors: Tensor) -> Tensor:
        return mean_loss(model, case.model, StepInputs(*tensors))

    step = trace_fixed_step(
        model,
        loss,
        StepInputs(*(torch.empty(case.input_shape, dtype=torch.int64, device="meta") for _ in StepInputs._fields)),
        gradient_seed=case.gradient_seed,
        device=torch.device("cpu"),
    )
    scene = PlacementInputs(
        layers=layers,
        parameters=parameters,
        tensor_ranks=size,
        times={f"layers.{index}": len(own) for index, own in kinds.items()},
        compute=compute,
        reduce=reduce,
    )
    return Traced(build(step, scene), scene, kinds)


def _keep_one_of_a_kind(model: nn.Module) -> dict[str, list[str]]:
    """Remove all layers but the first of each kind.

    Layers are of a kind if their parameters have equal names and shapes.

    Returns new index of a layer -> indices of the original layers of this kind, such as `{"0": ["0", "1"]}`.
    """
    kinds: dict[tuple[tuple[str, torch.Size], ...], list[str]] = {}
    blocks = dict(model.get_submodule("layers").named_children())
    for index, block in blocks.items():
        kinds.setdefault(tuple((name, x.shape) for name, x in block.named_parameters()), []).append(index)
    model.add_module("layers", nn.ModuleList(blocks[own[0]] for own in kinds.values()))
    return {str(number): own for number, own in enumerate(kinds.values())}


def _layers_and_parameters(
    model: nn.Module, mesh: Mesh, size: int, num_tokens: int
) -> tuple[list[PlacedLayer], list[PlacedParameter]]:
    layers: list[PlacedLayer] = []
    dims: dict[str, int | None] = {}
    for index, block in model.get_submodule("layers").named_children():
        for name, module in block.named_children():
            # A norm is no layer of the linear program, but its parameters still get a placement below.
            if isinstance(module, RMSNorm):
                continue
            path, is_moe = f"layers.{index}.{name}", isinstance(module, MoE)
            # A layer stays whole if its shapes cannot be divided among tensor ranks: `split_dims` then refuses it.
            may_be: tuple[str, ...] = (WHOLE,)
            try:
                dims |= split_dims(path, module, size, num_tokens)
                may_be = (WHOLE,) if size == 1 else (SPLIT,) if is_moe else (WHOLE, SPLIT)
            except CaseError:
                if is_moe and size > 1:  # a mixture of experts cannot be whole on several tensor ranks
                    raise
            layers.append(PlacedLayer(name=path, may_be=may_be, is_opaque=is_moe))
    parameters = []
    for name, parameter in model.named_parameters():
        is_expert = ".experts." in name
        own = next((layer.name for layer in layers if name.startswith(f"{layer.name}.")), None)
        parameters.append(
            PlacedParameter(
                name=name,
                shape=tuple(parameter.shape),
                layer=own,
                split_dim=dims.get(name) if size > 1 else None,
                data_ranks=mesh.size(EXPERT_FSDP if is_expert else FSDP),
                parts=mesh.size(EXPERT) if is_expert else 1,
            )
        )
    return layers, parameters


def _has_choice(traced: Traced, taken: Taken, name: str, choice: str) -> bool:
    return traced.program.nodes[name][taken.choices[name]].name == choice


def _row(traced: Traced, taken: Taken, parameter: PlacedParameter) -> PlacedTensor:
    choice = traced.program.nodes[parameter.name][taken.choices[parameter.name]]
    data, tensor = choice.name.split()
    # A row stands for the parameters of all layers of a kind: `layers.0.attention.wq to layers.3.attention.wq`.
    copies = traced.names(parameter.name)
    first, *_, last = copies if len(copies) > 1 else (*copies, *copies)
    return PlacedTensor(
        name=first if first == last else f"{first} to {last}",
        copies=len(copies),
        data=data,
        tensor=tensor,
        cost=choice.cost,
        bytes=round(choice.bytes),
    )


def _by_number(name: str) -> tuple[int, str]:
    # By number first: as text, layer 10 would precede layer 2.
    return int(name.split(".")[1]), name
