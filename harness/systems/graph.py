"""The systems that run a graph: bitproof's own trainer, with gradients from a traced and rewritten step.

    graph       the step traced by bitproof, with a symbolic dim for chunks
    joint       the step exported by ahead-of-time autograd, partitioned into forward and backward
    autoplace   like graph, for a model whose placements are computed by `systems.autoplace`

The step is traced and rewritten once, without a process group, and all ranks run the result. Collectives in the graph
refer to process groups by name, and the names are the same on all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.case import GRAPH, JOINT, Case, Chunking
from bitproof.harness.errors import ArtifactError
from bitproof.harness.graph.analysis.halves import is_partitioned
from bitproof.harness.graph.backend.backends import compile_for, compile_halves
from bitproof.harness.graph.backend.device_constants import forget_device_index
from bitproof.harness.graph.collector import gc_paused
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.dump import GraphDump
from bitproof.harness.graph.extra_pass import insert, load_pass
from bitproof.harness.graph.graph_options import GraphOptions, parse_pass
from bitproof.harness.graph.groups import Group, GroupTable
from bitproof.harness.graph.hazards import hazard_lines
from bitproof.harness.graph.observation import observe_activations, observed_by
from bitproof.harness.graph.pipeline import PassRow, apply_until, build_pipeline, run_pipeline
from bitproof.harness.graph.staged.cut_graph import CutGraph, cut
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.harness.graph.staged.placed_calls import Once
from bitproof.harness.graph.tracing.trace import JointGraph, StepGraph, trace_joint_step
from bitproof.harness.machine.determinism import keeping_switches
from bitproof.harness.records import Artifact, PassReport
from bitproof.harness.systems.graph_key import placed_case, step_part
from bitproof.harness.torch_operators import below_autograd
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.parallel.mesh import EXPERT, GROUP_NAMES, TENSOR, Mesh, ensure_group
from bitproof.reference.step import Trainer, WrapGradients, build_sharded_model, mean_loss

if TYPE_CHECKING:
    from bitproof.harness.disturb.entry import Entry

log = logging.getLogger(__name__)


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
            _, groups = graph_of_program(case, self)
            self.__dict__["_hazards"] = hazard_lines(self.module, groups.partitions())
        found: list[str] = self.__dict__["_hazards"]
        return found

    def set_hazards(self, found: list[str]) -> None:
        """Set the result of `hazards`, for a graph that was read from the cache, which also has its hazards."""
        self.__dict__["_hazards"] = found

    @property
    def generated_hash(self) -> str | None:
        return next((entry.facts["generated_hash"] for entry in self.passes if entry.name == "backend"), None)


@dataclass(frozen=True)
class TracedStep:
    """A case's traced step before any pass. `seconds` is the duration of the trace."""

    joint: JointGraph
    seconds: float
    system: str = GRAPH
    layout: tuple[Layout, ...] = ()


def prepare(case: Case, device: torch.device, options: GraphOptions | None = None, system: str = GRAPH) -> GraphProgram:
    """Trace a case's step for tensors on `device`, and run all passes, including the user's (`options`).

    Raises TraceError, ChunkError or PassError. Raises UsageError if a user's pass refers to an unknown pass.
    """
    return finish(trace(case, device, system=system), case, device, options)


@gc_paused()
def trace(
    case: Case,
    device: torch.device,
    enter: Callable[[str], None] = lambda place: None,
    system: str = GRAPH,
    rank: int = 0,
) -> TracedStep:
    """Trace a case's step for tensors on `device`, as rank `rank` would run it. The trace must not depend on `rank`.

    Reads only the fields of the case that `step_part` keeps. `enter` gets the current activity, such as "in tracing".
    Raises TraceError.
    """
    enter("in tracing")
    # All other fields get their defaults, so the trace cannot depend on them.
    case = step_part(placed_case(case))
    start = time.perf_counter()
    mesh = Mesh(rank, case.parallelism)
    # On the meta device, as tracing needs shapes and dtypes, and no values.
    model = build_sharded_model(case, mesh, torch.device("meta"), shares=True)
    shape = case.input_shape
    inputs = StepInputs(*(torch.empty(shape, dtype=torch.int64, device="meta") for _ in StepInputs._fields))

    def loss_function(*tensors: Tensor) -> Tensor:
        return mean_loss(model, case.model, StepInputs(*tensors))

    seed = case.gradient_seed
    if system == JOINT:
        from bitproof.harness.graph.tracing.export_joint import export_joint_step

        joint = export_joint_step(
            model,
            loss_function,
            inputs,
            gradient_seed=seed,
            device=device,
            chunking=case.chunking,
            chunk_dim=case.chunk_dim if case.chunking else 0,
        )
    else:
        whole = 0 if shape[0] > 1 else len(shape) - 1  # a symbolic dim is assumed to have more than one row
        dim = case.chunk_dim if case.chunking else whole
        joint = trace_joint_step(
            model,
            loss_function,
            inputs,
            chunk_dim=dim,
            gradient_seed=seed,
            device=device,
            observe=case.observe,
            is_cut=case.chunking is not None,
            chunking=case.chunking,
        )
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    layout = tuple(Layout.of(name, state[name]) for name in (*joint.parameter_names, *joint.buffer_names))
    return TracedStep(joint, time.perf_counter() - start, system, layout)


def column_of(case: Case, system: str) -> list[PassRow]:
    """Return the passes that `finish` would run for a case, in order, without a user's passes. Nothing is traced."""
    nothing: Any = None  # a step's facts affect the work of passes, not their list
    context = PassContext(
        chunk_symbol=nothing,
        chunking=case.chunking,
        memory=case.memory,
        pipeline=case.pipeline,
        is_joint=system == JOINT,
    )
    return cast(list[PassRow], apply_until(build_pipeline(context), case.pipeline.until))


@gc_paused()
def finish(
    traced: TracedStep,
    case: Case,
    device: torch.device,
    options: GraphOptions | None = None,
    enter: Callable[[str], None] = lambda place: None,
) -> GraphProgram:
    """Run the passes on a traced step, including the user's passes (`options`).

    The passes modify the traced graph, so a trace can be finished only once. Raises the errors of `prepare`.
    """
    options = options or GraphOptions()
    extra_passes = []
    for text in options.extra_passes:
        enter(f"in loading extra pass {text}")
        # Importing a file may change torch's switches, as a pass may.
        with keeping_switches(f"the file of extra pass {text}"):
            extra_passes.append(load_pass(parse_pass(text)))
    joint = traced.joint
    context = PassContext(
        chunk_symbol=joint.chunk_symbol,
        chunking=case.chunking,
        chunk_groups=frozenset({EXPERT, TENSOR}),
        guards=tuple(joint.guards),
        memory=case.memory,
        pipeline=case.pipeline,
        groups=group_table(Mesh(0, case.parallelism)),
        module_calls=joint.module_calls,
        is_joint=traced.system == JOINT,
        # The number of layers decides where the stages of a pipeline begin.
        cuts=Cuts(case.stages, sum(re.fullmatch(r"layers\.\d+", name) is not None for name in joint.module_calls)),
    )
    passes = apply_until(insert(build_pipeline(context), extra_passes), case.pipeline.until)
    dump = GraphDump(options.dump_dir, joint.parameter_names, joint.buffer_names) if options.dump_dir else None
    with dump or contextlib.nullcontext():
        module, reports = run_pipeline(joint.module, passes, context, dump, enter)
    # All ranks must have the same code, but each may have another device.
    forget_device_index(module, device)
    if case.observe:
        enter("in observing activations")
        is_chunked = any(entry.name == "chunk" for entry in reports)
        reports.append(_observed(module, case.observe, case.chunking if is_chunked else None))
    run: Callable[..., Any] = module
    if case.pipeline.compiles:
        enter(f"in backend {case.pipeline.backend}")
        run, report = _compiled(module, case, context.groups)
        reports.append(report)
    if case.pipeline.captures:
        # Checked after the passes, since these may add operators.
        from bitproof.harness.graph.backend.cuda_graphs import check_capture

        enter("in looking for what no CUDA graph can hold")
        # Refuses operators that no CUDA graph supports.
        reports.append(check_capture(module))
    return GraphProgram(
        module=module,
        run=run,
        parameter_names=joint.parameter_names,
        buffer_names=joint.buffer_names,
        code_hash=code_hash(module),
        trace_seconds=traced.seconds,
        groups=context.groups.made(),
        passes=reports,
        parts=cut(module, context.cuts, joint.chunk_symbol, _once(case)) if case.schedule else None,
        layout=traced.layout,
    )


def _once(case: Case) -> Once:
    assert case.schedule is not None, "only a step in micro-batches is cut"
    schedule = case.schedule
    return Once(schedule.gathers_once, schedule.reductions_once, schedule.divides_backward)


def _observed(module: GraphModule, patterns: tuple[str, ...], chunking: Chunking | None) -> PassReport:
    start, num_nodes = time.perf_counter(), len(module.graph.nodes)
    num_shown = observe_activations(module, chunking)
    return PassReport(
        name="observe",
        seconds=time.perf_counter() - start,
        nodes_before=num_nodes,
        nodes_after=len(module.graph.nodes),
        settings={"patterns": list(patterns)},
        facts={"activations": num_shown},
    )


def mutate_program(program: GraphProgram, entry: Entry, case: Case) -> GraphProgram:
    """Return a copy of `program` with the deliberate fault `entry` in its graph.

    Raises UsageError if the graph has no call to which the fault applies.
    """
    start, num_nodes = time.perf_counter(), len(program.module.graph.nodes)
    from bitproof.harness.disturb.mutate import mutate

    module, sites = mutate(entry, program.module, case)
    # Listed like a pass, so that reports show that the graph has a fault.
    report = PassReport(
        name=f"fault {entry.name}",
        seconds=time.perf_counter() - start,
        nodes_before=num_nodes,
        nodes_after=len(module.graph.nodes),
        facts={"sites": [list(site) for site in sites]},
    )
    passes = [*program.passes, report]
    parts = program.parts.of_other(module) if program.parts else None
    # The graph runs without its backend, whose compiled code does not have the fault.
    return replace(program, module=module, run=module, code_hash=code_hash(module), passes=passes, parts=parts)


def code_hash(module: GraphModule) -> str:
    """Return the SHA-256 of the Python code of a graph module, including the graph modules inside it."""
    codes = [f"{name}\0{m.code}" for name, m in module.named_modules() if isinstance(m, GraphModule)]
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()


def _compiled(module: GraphModule, case: Case, groups: GroupTable) -> tuple[Callable[..., Any], PassReport]:
    assert case.pipeline.backend in ("inductor", "regional_inductor")
    num_nodes, sizes = len(module.graph.nodes), {name: len(g.partition[0]) for name, g in groups.groups.items()}
    start = time.perf_counter()
    compile_graph = compile_halves if is_partitioned(module.graph) else compile_for
    compiled = compile_graph(module, case.pipeline.backend, sizes, case.pipeline.regions)
    seconds = time.perf_counter() - start
    return compiled, PassReport("backend", seconds, num_nodes, num_nodes, facts=compiled.facts)


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


def graph_of_program(case: Case, program: GraphProgram) -> tuple[StepGraph, GroupTable]:
    """Return a pair: a program's graph, and the process groups that its calls may use.

    The groups are the mesh's, and those that passes have added.
    """
    graph = StepGraph(program.module, program.parameter_names, program.buffer_names, len(StepInputs._fields))
    return graph, GroupTable({**group_table(Mesh(0, case.parallelism)).groups, **program.groups})


def group_table(mesh: Mesh) -> GroupTable:
    return GroupTable(
        {name: Group(mesh.object_of(name), tuple(map(tuple, mesh.partition(name)))) for name in GROUP_NAMES}
    )
