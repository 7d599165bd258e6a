"""Trace a case's training step, and run the passes on it. The systems that run such a graph:

    graph       the step traced by bitproof, with a symbolic dim for chunks
    joint       the step exported by ahead-of-time autograd, partitioned into forward and backward
    autoplace   like graph, for a model whose placements are computed by `systems.autoplace`

The step is traced and rewritten once, without a process group, and all ranks run the result. Collectives in the graph
refer to process groups by name, and the names are the same on all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.case import GRAPH, JOINT, Case, Chunking
from bitproof.harness.graph.analysis.halves import is_partitioned
from bitproof.harness.graph.backend.backends import compile_for, compile_halves
from bitproof.harness.graph.backend.device_constants import forget_device_index
from bitproof.harness.graph.collector import gc_paused
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.dump import GraphDump
from bitproof.harness.graph.extra_pass import insert, load_pass
from bitproof.harness.graph.graph_options import GraphOptions, parse_pass
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.observation import observe_activations
from bitproof.harness.graph.pipeline import PassRow, apply_until, build_pipeline, run_pipeline
from bitproof.harness.graph.staged.cut_graph import cut
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.harness.graph.staged.placed_calls import Once
from bitproof.harness.graph.tracing.trace import JointGraph, StepGraph, trace_joint_step
from bitproof.harness.machine.determinism import keeping_switches
from bitproof.harness.records import PassReport
from bitproof.harness.systems.graph_key import placed_case, step_part
from bitproof.harness.systems.graph_program import GraphProgram, Layout, code_hash, group_table, groups_of
from bitproof.reference.data import Step as StepInputs
from bitproof.reference.parallel.mesh import EXPERT, TENSOR, Mesh
from bitproof.reference.step import build_sharded_model, mean_loss

if TYPE_CHECKING:
    from bitproof.harness.disturb.entry import Entry

log = logging.getLogger(__name__)


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


def _compiled(module: GraphModule, case: Case, groups: GroupTable) -> tuple[Callable[..., Any], PassReport]:
    assert case.pipeline.backend in ("inductor", "regional_inductor")
    num_nodes, sizes = len(module.graph.nodes), {name: len(g.partition[0]) for name, g in groups.groups.items()}
    start = time.perf_counter()
    compile_graph = compile_halves if is_partitioned(module.graph) else compile_for
    compiled = compile_graph(module, case.pipeline.backend, sizes, case.pipeline.regions)
    seconds = time.perf_counter() - start
    return compiled, PassReport("backend", seconds, num_nodes, num_nodes, facts=compiled.facts)


def graph_of_program(case: Case, program: GraphProgram) -> tuple[StepGraph, GroupTable]:
    """Return a pair: a program's graph, and the process groups that its calls may use.

    The groups are the mesh's, and those that passes have added.
    """
    graph = StepGraph(program.module, program.parameter_names, program.buffer_names, len(StepInputs._fields))
    return graph, groups_of(case, program)
