"""Runs the passes on a traced graph in order, and verifies, times and reports each.

The pass list is here: a row for each pass, with all properties of the pass.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from bitproof.harness.case import Chunking, Memory
from bitproof.harness.errors import BitproofError, CaseError
from bitproof.harness.graph.collector import gc_paused
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.extra_pass import ExtraPass
from bitproof.harness.graph.operators import operator_name
from bitproof.harness.graph.passes.bucket import bucket
from bitproof.harness.graph.passes.chunk import chunk
from bitproof.harness.graph.passes.clean_up import clean_up
from bitproof.harness.graph.passes.concretize_symbols import concretize_symbols
from bitproof.harness.graph.passes.dense_traffic import dense_traffic
from bitproof.harness.graph.passes.isolate_gathers import isolate_gathers
from bitproof.harness.graph.passes.isolate_process_groups import isolate_process_groups
from bitproof.harness.graph.passes.measure_memory import measure_memory
from bitproof.harness.graph.passes.offload import offload
from bitproof.harness.graph.passes.overlap import overlap
from bitproof.harness.graph.passes.partition import partition
from bitproof.harness.graph.passes.rematerialize import rematerialize
from bitproof.harness.graph.passes.tag_memory import tag_memory
from bitproof.harness.graph.staged.stage_graphs import StageGraph, StageGraphs
from bitproof.harness.graph.stages import OPEN, RESOLVED, GraphStage
from bitproof.harness.graph.verify import Facts
from bitproof.harness.machine.determinism import keeping_switches
from bitproof.harness.records import PassReport
from bitproof.harness.records.result import STAGES

log = logging.getLogger(__name__)

Pass = Callable[[GraphModule, PassContext], GraphModule]
Observe = Callable[[str, GraphModule], None]


BLOCKS = "layers.*"
"""The pattern of modules that are blocks of layers. Saved activations and buckets of parameters are chosen by block."""


@dataclass(frozen=True)
class PassRow:
    """A row of the pass list: a pass and its properties.

    - `run`: the pass's function.
    - `is_wanted`: True if the case needs the pass.
    - `follows`: the case's settings that the pass reads from its context.
    - `bound`: settings that are fixed in the pass list. They are arguments of `run`.
    - `leaves`: the graph's stage after the pass; None if the stage stays the same.

    A recording's manifest has the settings in `follows` and `bound`.
    """

    run: Callable[..., GraphModule]
    is_wanted: bool = True
    follows: Chunking | Memory | None = None
    bound: Mapping[str, Any] = field(default_factory=dict)
    leaves: GraphStage | None = None

    @property
    def __name__(self) -> str:
        return self.run.__name__

    @property
    def settings(self) -> dict[str, Any]:
        return (dataclasses.asdict(self.follows) if self.follows else {}) | dict(self.bound)

    def __call__(self, module: GraphModule, context: PassContext) -> GraphModule:
        return self.run(module, context, **self.bound)


def build_pipeline(context: PassContext) -> list[PassRow]:
    """Return the passes that a case needs, in order."""
    chunking, memory, options = context.chunking, context.memory, context.pipeline
    # A setting that no case chooses is bound here.
    by_blocks = {"blocks": BLOCKS}
    pass_list = [
        PassRow(clean_up),
        PassRow(partition, context.is_joint, bound={"by": "min_cut"}),
        PassRow(tag_memory, memory.policy != "none", follows=memory, bound=by_blocks),
        PassRow(offload, memory.policy == "offload", follows=memory, bound=by_blocks),
        PassRow(rematerialize, memory.policy != "none", follows=memory),
        PassRow(chunk, chunking is not None, follows=chunking, leaves=RESOLVED),
        PassRow(isolate_process_groups, options.isolate_groups),
        PassRow(isolate_gathers, options.isolate_gathers),
        PassRow(bucket, options.bucket, bound=by_blocks),
        PassRow(overlap, options.overlap or options.async_tensor),
        PassRow(dense_traffic, options.dense_traffic),
        PassRow(concretize_symbols, leaves=RESOLVED),
        PassRow(measure_memory),
    ]
    return [row for row in pass_list if row.is_wanted]


def apply_until(pass_list: Sequence[Pass], until: str | None) -> list[Pass]:
    """Return the pass list up to and including the pass `until`.

    None stands for the whole list, and "" for an empty list. Raises CaseError for an unknown name.
    """
    names = [run_pass.__name__ for run_pass in pass_list]
    if until is None or until == "":
        return list(pass_list) if until is None else []
    if until not in names:
        raise CaseError(
            f"there is no pass {until} to stop after",
            expected=", ".join(names),
            found=f"until={until!r}",
            fix='name a pass of the list, or "" for none of them',
        )
    return list(pass_list[: names.index(until) + 1])


@gc_paused()
def run_pipeline(
    module: GraphModule,
    passes: Sequence[Pass],
    context: PassContext,
    observe: Observe | None = None,
    enter: Callable[[str], None] = lambda place: None,
) -> tuple[GraphModule, list[PassReport]]:
    """Run the passes in order, and verify the graph after each. Returns (the new graph, a report for each pass).

    - `passes`: rows of the pass list, users' passes, or functions with the same signature. Such a function has no
      settings, and does not change the graph's stage.
    - `observe`: gets the name "traced" and the traced graph. After each pass, before the new graph is verified, it gets
      the pass's name and the new graph.
    - `enter`: gets a text such as "in pass chunk" before each pass.

    If the case has pipeline stages, each pass runs on the graph of every stage. It must find something to do in at
    least one of them. An error names its pass.
    """
    reports: list[PassReport] = []
    stages = StageGraphs.of(module, context.cuts, context.chunk_symbol)
    # Without pipeline stages there is a single graph, and so a single run.
    runs = [_StageRun(graph, stages.context_of(graph, context)) for graph in stages.graphs]
    counts = _count_operators(stages)
    if observe is not None:
        observe("traced", module)
    for run_pass in passes:
        name = run_pass.__name__
        enter(f"in {'extra ' * isinstance(run_pass, ExtraPass)}pass {name}")
        report = _sum_reports([run.run(run_pass) for run in runs])
        # Only after all stages: a pass may find nothing in one stage, but must find something in another.
        _refuse_idle(name, runs)
        # Before the checks, so that a dump also has a graph that they refuse.
        if observe is not None:
            observe(name, stages.joined())
        for run in runs:
            run.check(run_pass)
        log.debug("pass %s: %d -> %d nodes in %.3f s", name, report.nodes_before, report.nodes_after, report.seconds)
        counts_before, counts = counts, _count_operators(stages)
        reports.append(replace(report, changed=_changes(counts_before, counts)))
    return stages.joined(), reports


class _StageRun:
    """The runs of the passes on the graph of a single pipeline stage.

    `idle` is the error of the last pass, if that pass found nothing to do in this graph; otherwise None.
    """

    def __init__(self, graph: StageGraph, context: PassContext) -> None:
        self.graph, self.context = graph, context
        self.idle: BitproofError | None = None
        self._stage, self._facts = OPEN, Facts.of(graph.module)

    def run(self, run_pass: Pass) -> PassReport:
        name, num_nodes = run_pass.__name__, len(self.graph.module.graph.nodes)
        self.context.facts.clear()
        self.idle = None
        # A pass that set a global switch would change later passes and the ranks forked from this process.
        with _naming_pass(name), keeping_switches(f"{'extra ' * isinstance(run_pass, ExtraPass)}pass {name}"):
            start = time.perf_counter()
            try:
                self.graph.module = run_pass(self.graph.module, self.context)
            except BitproofError as error:
                # Such an error only means that the pass matched nothing in this graph.
                if not error.finds_nothing:
                    raise
                self.idle = error
            seconds = time.perf_counter() - start
        return PassReport(
            name=name,
            seconds=seconds,
            nodes_before=num_nodes,
            nodes_after=len(self.graph.module.graph.nodes),
            settings=getattr(run_pass, "settings", {}),
            facts=dict(self.context.facts),
        )

    def check(self, run_pass: Pass) -> None:
        with _naming_pass(run_pass.__name__):
            if self.idle is None:
                # A pass that found nothing leaves the stage as it was, such as `chunk` with open symbols.
                self._stage = getattr(run_pass, "leaves", None) or self._stage
            self._facts = self._stage.check(self.graph.module, self._facts, self.context.chunk_symbol)


def _refuse_idle(name: str, runs: Sequence[_StageRun]) -> None:
    # The error of the first stage stands for all.
    idle = [run.idle for run in runs if run.idle is not None]
    if len(idle) == len(runs):
        with _naming_pass(name):
            raise idle[0]


def _sum_reports(each: Sequence[PassReport]) -> PassReport:
    if len(each) == 1:
        return each[0]
    return replace(
        each[0],
        seconds=sum(report.seconds for report in each),
        nodes_before=sum(report.nodes_before for report in each),
        nodes_after=sum(report.nodes_after for report in each),
        facts={STAGES: [report.facts for report in each]},
    )


@contextmanager
def _naming_pass(name: str) -> Iterator[None]:
    try:
        yield
    except BitproofError as error:
        error.where = ", ".join(filter(None, (error.where, f"pass {name}")))
        raise
    except Exception as error:
        error.add_note(f"  in pass: {name}")
        raise


def _count_operators(stages: StageGraphs) -> Counter[str]:
    nodes = (node for stage in stages.graphs for node in stage.module.graph.nodes)
    return Counter(operator_name(node) for node in nodes if node.op == "call_function")


def _changes(before: Counter[str], after: Counter[str]) -> dict[str, list[int]]:
    names = sorted(before.keys() | after.keys())
    # Each operator's number of calls before and after the pass.
    return {name: [before[name], after[name]] for name in names if before[name] != after[name]}
