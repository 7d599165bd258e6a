"""A training step as a graph, and the trainer that runs it.

This is what a rank needs. Tracing a step and running the passes on it is in `systems/graph.py`, which is not loaded for
a graph from the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.case import Case
from bitproof.harness.errors import ArtifactError
from bitproof.harness.graph.groups import Group, GroupTable
from bitproof.harness.graph.observation import observed_by
from bitproof.harness.records import Artifact, PassReport
from bitproof.harness.torch_operators import below_autograd
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.parallel.mesh import GROUP_NAMES, Mesh, ensure_group
from bitproof.reference.step import Trainer, WrapGradients

if TYPE_CHECKING:
    from bitproof.harness.graph.staged.cut_graph import CutGraph


class Layout(NamedTuple):
    """The name, dtype and local shape of a parameter or buffer; equal on all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, tensor: Tensor) -> Layout:
        return Layout(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@dataclass(frozen=True)
class GraphProgram:
    """A training step as a graph that any rank can run.

    - `module`: the graph.
    - `run`: the function that runs it: the graph itself, or code that a backend has compiled.
    - `code_hash`: hash of the graph's code; equal on all ranks.
    - `groups`: process groups by name. All ranks must create them in this order before they run the graph.
    - `passes`: reports of the passes that have run.
    - `parts`: for a case with micro-batches, the graph of one micro-batch, cut into pipeline stages.
    - `is_kept`: whether the graph is from the cache (harness/systems/cached_graph.py).
    - `layout`: parameters and buffers for which the step was traced; empty if unknown.
    - `artifact`: the file of the precompiled step; None if the step is not precompiled.
    """

    module: GraphModule
    run: Callable[..., Any]
    parameter_names: list[str]
    buffer_names: list[str]
    code_hash: str
    groups: Mapping[str, Group]
    trace_seconds: float
    passes: list[PassReport]
    parts: CutGraph | None = None
    is_kept: bool = False
    layout: tuple[Layout, ...] = ()
    artifact: Artifact | None = None

    @property
    def chunked(self) -> dict[str, int] | None:
        """Return module -> number of its calls per step, for each module that the chunk pass rewrote.

        None if that pass did not run.
        """
        chunk = next((entry for entry in self.passes if entry.name == "chunk"), None)
        return (
            None if chunk is None else {name: n for own in chunk.by_stage for name, n in own.get("calls", {}).items()}
        )

    def hazards(self, case: Case) -> list[str]:
        """Return a line for each pair of calls that use memory in no fixed order, and for each possible deadlock."""
        # Computed once: ranks that are forked afterwards inherit the result. In `__dict__`, as the class is frozen.
        if "_hazards" not in self.__dict__:
            from bitproof.harness.graph.hazards import hazard_lines

            self.__dict__["_hazards"] = hazard_lines(self.module, groups_of(case, self).partitions())
        found: list[str] = self.__dict__["_hazards"]
        return found

    def set_hazards(self, found: list[str]) -> None:
        """Set the result of `hazards`, for a graph that was read from the cache, which also has its hazards."""
        self.__dict__["_hazards"] = found

    @property
    def generated_hash(self) -> str | None:
        return next((entry.facts["generated_hash"] for entry in self.passes if entry.name == "backend"), None)


def code_hash(module: GraphModule) -> str:
    """Return the SHA-256 of the Python code of a graph module, including the graph modules inside it."""
    codes = [f"{name}\0{m.code}" for name, m in module.named_modules() if isinstance(m, GraphModule)]
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()


def make_graph_system(
    case: Case, mesh: Mesh, device: torch.device, program: GraphProgram, wrap: WrapGradients
) -> Trainer:
    """Make a trainer whose gradients are computed by `program`.

    `wrap` wraps this computation, so that a fault can change it. All ranks must call this function together, because it
    creates process groups.
    """
    # In this order on all ranks, as making a group is itself a collective.
    for name, group in program.groups.items():
        ensure_group(name, group.partition, high_priority=group.high_priority)
    trainer = Trainer(case, mesh, device)
    trainer.graph = program.run
    is_plain = program.run is program.module  # compiled code may call operators that need autograd's dispatch
    trainer.chunked = program.chunked
    if program.chunked is not None and case.schedule is not None:
        # A rank runs the graph of a micro-batch several times, and only the modules of its own stages.
        own = {name for name, _ in trainer.model.named_modules()}
        trainer.chunked = {name: calls * case.micro_batches for name, calls in program.chunked.items() if name in own}
    buffers = dict(trainer.model.named_buffers())
    if program.parts is not None:
        from bitproof.harness.systems.staged_gradients import staged_gradients

        trainer.gradients = wrap(
            staged_gradients(trainer, program.parts, program.parameter_names, program.buffer_names)
        )
        return trainer
    _check_layout(program, {**trainer.parameters, **buffers})
    state: list[Tensor] = [trainer.parameters[name] for name in program.parameter_names]
    state += [buffers[name] for name in program.buffer_names]

    # A log of calls replaces `trainer.graph`, so it is looked up at each call.
    run: Callable[..., Any] = lambda *given: trainer.graph(*given)  # noqa: E731
    if case.pipeline.captures:
        from bitproof.harness.graph.backend.cuda_graphs import StaticStep

        run = StaticStep(run, program.module, len(state))

    def gradients(inputs: StepInputs) -> tuple[Tensor, dict[str, Tensor]]:
        # The graph itself computes the gradients, so autograd has nothing to record.
        with torch.no_grad(), below_autograd() if is_plain else contextlib.nullcontext():
            loss, *values = run(*state, *inputs)
        return loss, dict(zip(program.parameter_names, values, strict=True))

    trainer.gradients = wrap(gradients)
    trainer.activations_shown_to = observed_by
    return trainer


def _check_layout(program: GraphProgram, own: Mapping[str, Tensor]) -> None:
    # Any other program was traced for this very case, so its state has the same form.
    for layout in program.layout if program.artifact else ():
        found = Layout.of(layout.name, own[layout.name]) if layout.name in own else None
        if found != layout:
            raise ArtifactError(
                "the precompiled step was made for state of another form than this rank's",
                expected=f"{layout.name}: {layout.dtype} {list(layout.shape)}",
                found=f"{found.dtype} {list(found.shape)}" if found else "no tensor of that name",
                fix="precompile the case again",
            )


def groups_of(case: Case, program: GraphProgram) -> GroupTable:
    """Return the process groups that a program's calls may use: the mesh's, and those that passes have added."""
    return GroupTable({**group_table(Mesh(0, case.parallelism)).groups, **program.groups})


def group_table(mesh: Mesh) -> GroupTable:
    return GroupTable(
        {name: Group(mesh.object_of(name), tuple(map(tuple, mesh.partition(name)))) for name in GROUP_NAMES}
    )
