"""The system `compiled`: the case's reference system, with its models compiled by torch.compile.

A case can use `compiled` as its candidate if its reference system has a `model`; systems from `watch` have it. Each
piece of code that Dynamo captures goes through these stages, on each rank separately:

    captured        the captured code, in torch's functions; if the list ends here, eager autograd runs its backward
    differentiate   ahead-of-time autograd makes a forward and a backward graph of operators
    decompose       operators are decomposed into operators that Inductor can lower (backend "inductor" only)
    ...             the user's passes (--extra-pass) run on each graph
    backend         Inductor compiles each graph (backend "inductor" only); otherwise it runs operator by operator

`pipeline.until` in the case ends the list early, so `bitproof bisect` can find the stage that changes bits. Sizes are
static: code that is called with other sizes is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.fx import GraphModule, Node

from bitproof.harness.case import Case
from bitproof.harness.errors import UsageError
from bitproof.harness.files.folder_names import file_name
from bitproof.harness.graph.backend.backends import settings_in
from bitproof.harness.graph.backend.generated_code import hash_generated
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.dump import GraphDump
from bitproof.harness.graph.extra_pass import insert, load_pass
from bitproof.harness.graph.graph_options import GraphOptions, parse_pass
from bitproof.harness.graph.hazards import hazard_lines
from bitproof.harness.graph.origin import META_KEY, Origin, origin_of, part_in, user_line
from bitproof.harness.graph.pipeline import PassRow, apply_until, run_pipeline
from bitproof.harness.graph.tracing.export_joint import NO_CHUNKS
from bitproof.harness.graph.tracing.trace import ChunkSymbol
from bitproof.harness.records import PassReport
from bitproof.harness.torch_compat import disable_current_modes
from bitproof.harness.torch_compile import ahead_of_time, boxed, compile_calls
from bitproof.harness.torch_inductor import inductor_backend, lowering_decompositions
from bitproof.harness.within_user_code import refusing

Run = Callable[..., Any]
Call = Callable[["KernelGraph", Run, list[Any]], Any]

_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def differentiate(module: GraphModule, context: PassContext) -> GraphModule:
    """Return the graph unchanged, since ahead-of-time autograd has already run.

    This pass marks the stage, so that `pipeline.until` can end here, or a user's pass can follow.
    """
    return module


def decompose(module: GraphModule, context: PassContext) -> GraphModule:
    """Return the graph unchanged: like `differentiate`, this pass only marks a stage."""
    return module


class KernelGraph(NamedTuple):
    """A graph that Inductor has compiled to kernels, so that only its inputs and outputs can be observed.

    - `label`: name of the graph's dump.
    - `module`: path of the innermost module that contains all of its calls.
    - `direction`: "forward" or "backward".
    - `outputs`: for each output, the call that computes it.
    - `num_visible`: number of outputs that the caller gets; all later outputs are only saved for backward.
    """

    label: str
    module: str
    direction: str
    outputs: tuple[str, ...]
    num_visible: int


class Capture:
    """Compiles a rank's models with torch.compile at their first calls, and collects facts about each captured graph.

    - `run`: makes a graph of operators callable.
    - `call`: calls a graph that Inductor has compiled.

    Replace both to observe calls (see `run_by`).
    """

    def __init__(self, case: Case, models: Sequence[nn.Module], options: GraphOptions, work: Path) -> None:
        extras = [load_pass(parse_pass(text)) for text in options.extra_passes]
        rows: list[PassRow] = [PassRow(differentiate), PassRow(decompose, case.pipeline.backend == "inductor")]
        wanted = [row for row in rows if row.is_wanted]
        for extra, text in zip(extras, options.extra_passes, strict=True):
            if "@" not in text:  # at the end by default, as in the other pass lists
                extra.spec = replace(extra.spec, anchor=wanted[-1].__name__)
        self.passes = apply_until(insert(wanted, extras), case.pipeline.until)
        self.run: Callable[[GraphModule], Run] = lambda module: module.forward
        self.call: Call = lambda graph, kernels, inputs: kernels(inputs)
        self._inductor = work if case.pipeline.compiles else None
        self._decomposes = any(each.__name__ == "decompose" for each in self.passes)
        # Names of modules, to recognize them in Dynamo's paths.
        self._names = {name for model in models for name, _ in model.named_modules()}
        self._dump_dir = options.dump_dir
        self.reports: dict[str, PassReport] = {}
        self.codes: list[str] = []
        self.races: list[str] = []
        self.num_calls = 0

        def bitproof(module: GraphModule, inputs: Sequence[Any]) -> Run:  # reports show backends by their names
            return self._backend(module, inputs)

        for model in models:
            compile_calls(model, bitproof)

    def _backend(self, module: GraphModule, inputs: Sequence[Any]) -> Run:
        self._write("captured", module.print_readable(print_output=False))
        # `pipeline.until` ends the list before its first stage, so eager autograd differentiates the captured code.
        if not self.passes:
            self.codes.append(module.code)
            return module.forward
        if self._inductor:
            with settings_in(self._inductor):
                return inductor_backend(self._run_passes, self._compiled)(module, inputs)
        table = lowering_decompositions() if self._decomposes else None
        return ahead_of_time(self._run_uncompiled, table)(module, inputs)

    @contextmanager
    def run_by(self, runner: Callable[[GraphModule], Run], call: Call) -> Iterator[None]:
        own, self.run, self.call = (self.run, self.call), runner, call
        try:
            yield
        finally:
            self.run, self.call = own

    @property
    def code_hash(self) -> str:
        return hashlib.sha256("\0".join(self.codes).encode()).hexdigest()

    @property
    def generated_hash(self) -> str | None:
        return hash_generated(self._inductor) if self._inductor and self._inductor.is_dir() else None

    def _run_uncompiled(self, module: GraphModule, direction: str) -> Run:
        finished = self._run_passes(module, direction)
        # `self.run` is looked up at each call, as `run_by` replaces it for a while.
        return lambda *inputs: self.run(finished)(*inputs)

    def _run_passes(self, module: GraphModule, direction: str) -> GraphModule:
        label = f"{len(self.codes):03d}-{direction}"
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.meta[META_KEY] = self._origin(node, direction)
                # Passes read this entry of every call, and not all nodes have it here.
                node.meta.setdefault("val", None)
        context = PassContext(chunk_symbol=ChunkSymbol(NO_CHUNKS, 1))
        dump = GraphDump(self._dump_dir / label, [], []) if self._dump_dir else None
        # An error here is a refusal: Dynamo would wrap a pass's error, or run the code uncompiled. torch calls this
        # among fake tensors.
        with refusing(), disable_current_modes(), dump or contextlib.nullcontext():
            module, reports = run_pipeline(module, self.passes, context, dump)
        for report in reports:
            self._add_report(report)
        self.codes.append(module.code)
        self.races += hazard_lines(module)
        self.num_calls += sum(node.op == "call_function" for node in module.graph.nodes)
        return module

    def _compiled(self, compile_graph: Callable[[], Run], module: GraphModule, direction: str) -> Run:
        began, num_nodes = time.perf_counter(), len(module.graph.nodes)
        assert self._inductor is not None
        with settings_in(self._inductor):
            run = compile_graph()
        facts = {"backend": "inductor", "nodes_compiled": num_nodes}
        self._add_report(PassReport("backend", time.perf_counter() - began, num_nodes, num_nodes, facts=facts))
        graph = kernel_graph_of(module, f"{len(self.codes) - 1:03d}-{direction}", direction)
        return boxed(lambda inputs: self.call(graph, run, inputs))

    def _add_report(self, report: PassReport) -> None:
        before = self.reports.get(report.name)
        if before is None:
            self.reports[report.name] = report
            return
        # A pass runs over each graph, but has a single report: counts of operators, [before, after], are added.
        changed = dict(before.changed)
        for name, (was, now) in report.changed.items():
            changed[name] = [changed.get(name, [0, 0])[0] + was, changed.get(name, [0, 0])[1] + now]
        # Node counts add up over graphs.
        compiled = {key: before.facts[key] + report.facts[key] for key in ("nodes_compiled",) if key in report.facts}
        self.reports[report.name] = replace(
            before,
            seconds=before.seconds + report.seconds,
            nodes_before=before.nodes_before + report.nodes_before,
            nodes_after=before.nodes_after + report.nodes_after,
            facts=before.facts | report.facts | compiled,
            changed=changed,
        )

    def _origin(self, node: Node, direction: str) -> Origin:
        # Backward nodes have the modules of the forward calls from which autograd made them.
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        module = _module_named(str([*stack.values()][-1][0]), self._names) if stack else ""
        is_backward = node.meta.get("partitioner_tag") == "is_backward" or direction == "backward"
        lines = [user_line(path, int(line)) for path, line in _LINE.findall(node.stack_trace or "")]
        # The innermost line of user code: lines of libraries are None.
        source = next((line for line in reversed(lines) if line is not None), None)
        part = part_in(node.meta.get("custom") or {})
        return Origin(module, "backward" if is_backward else "forward", source, part)

    def _write(self, name: str, text: str) -> None:
        if self._dump_dir is not None:
            self._dump_dir.mkdir(parents=True, exist_ok=True)
            (self._dump_dir / f"{len(self.codes):03d}-{file_name(name)}.txt").write_text(text + "\n")


def _module_named(path: str, names: set[str]) -> str | None:
    """Return the name of the module in a path of Dynamo, such as "blocks.0" for "L['fn'].__self__.blocks.0".

    This is the longest end of the path that is among `names`: "" for the model itself, None if there is none.
    """
    parts = path.split(".")[1:]
    if parts in ([], ["__self__"]):
        return ""
    return next((name for start in range(len(parts)) if (name := ".".join(parts[start:])) in names), None)


def kernel_graph_of(module: GraphModule, label: str, direction: str) -> KernelGraph:
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    paths = [(origin_of(node).module or "").split(".") for node in calls]
    # The innermost module with all of the calls: the longest common beginning of their modules' paths.
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    shared = ".".join(parts[0] for parts in alike)
    [result] = module.graph.find_nodes(op="output")
    given = result.args[0] if isinstance(result.args[0], (tuple, list)) else result.args
    outputs = tuple(f"{node} of {origin_of(node)}" if isinstance(node, Node) else str(node) for node in given)
    # The outputs of a forward graph end with the values that it saves for backward.
    visible = result.meta.get("user_visible_output_idxs", ()) if direction == "forward" else range(len(outputs))
    return KernelGraph(label, shared, direction, outputs, max(visible, default=len(outputs) - 1) + 1)


def compile_models(made: Any, case: Case, options: GraphOptions, work: Path) -> Capture:
    """Let torch.compile compile the models of the system `made` at their first calls. Return the `Capture` object.

    `work` is a folder for generated code. Raises UsageError if the system has no attribute `model` or `models`.
    """
    # If there are several models, the attribute `model` of a system from `watch` is None.
    models = getattr(made, "models", None) or [getattr(made, "model", None)]
    if not all(isinstance(model, nn.Module) for model in models):
        raise UsageError(
            f"the system {case.reference} shows no model that could be compiled",
            expected="an attribute `model`, a torch.nn.Module, as what watch makes has it",
            found=type(made).__name__,
        )
    return Capture(case, models, options, work)
