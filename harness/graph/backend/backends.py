"""The compiled backends for the finished graph: Inductor on the whole graph or on regions.

    inductor           the whole graph compiled, operators fused
    regional_inductor  regions compiled separately; the rest runs in eager. A region is an attention operator,
                       SDPA's or FlexAttention's, or the computation of a module that the case chooses

Needs:    a graph without the chunk symbol; the size of every process group that the graph names.
Promises: groups stay names and writes into inputs stay writes, so a single compiled step serves all ranks of a
          machine. The step's files are in a temporary folder that is removed with the step. Nothing compiled earlier
          is read.
Refuses:  a machine that cannot compile (MachineError) and a graph that Inductor cannot compile, or in which
          there is nothing to compile (PassError). A step never runs uncompiled instead.

A partitioned graph is compiled as two graphs, forward and backward, each as a whole or by regions.

For the whole graph:
1. Trace it again, decomposed into operators that Inductor lowers. In-place writes become copies at the graph's end.
2. Compile it. Process groups are known only by name and size, as their ranks do not exist yet.
For regions:
1. Mark the nodes of each region (compiled_regions.py).
2. Compile each region, and replace it by a call of the compiled code.
"""

from __future__ import annotations

import hashlib
import operator
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from bitproof.harness.errors import BitproofError, MachineError, PassError
from bitproof.harness.graph.analysis.halves import divide, run_halves
from bitproof.harness.graph.backend.compiled_regions import marked_by
from bitproof.harness.graph.backend.generated_code import count_launches, hash_generated
from bitproof.harness.graph.operators import attends, attends_backward
from bitproof.harness.graph.symbols import SYMBOLIC_SCALARS
from bitproof.harness.machine.compiler import compiler_problem
from bitproof.harness.torch_compat import HigherOrderOperator, symbolic_graph
from bitproof.harness.torch_distributed import group_of_size, register_group, unregister_group
from bitproof.harness.torch_inductor import (
    compile_marked_regions,
    compile_whole_graph,
    compiling,
    inductor_settings,
    is_inductor_error,
    lowering_decompositions,
)

Step = Callable[[list[Any]], Any]


SETTINGS: dict[str, Any] = {
    "compile_threads": 1,  # a pool of compiling processes would outlive the compilation
    "fx_graph_cache": False,
    "autotune_local_cache": False,
    "deterministic": True,
    "emulate_precision_casts": True,  # round to bfloat16 wherever eager does, within fused operators too
    "fallback_random": True,
    "max_autotune": False,
    "max_autotune_gemm": False,
}
"""Inductor's settings: deterministic, without autotuning and without caches.

Settings that this torch lacks are ignored.
"""


@dataclass(frozen=True)
class Compiled:
    """A compiled step, which is called with the graph's inputs.

    - `step`: the compiled function. It takes the inputs as a list, and empties the list.
    - `folder`: the folder with the step's files.
    - `facts`: facts for the report, by name.
    """

    step: Step
    folder: Path
    facts: dict[str, Any]

    def __call__(self, *inputs: Any) -> Any:
        return self.step(list(inputs))


def compile_for(
    module: GraphModule,
    backend: Literal["inductor", "regional_inductor"],
    group_sizes: Mapping[str, int],
    regions: tuple[str, ...] = (),
) -> Compiled:
    """Compile a graph with a backend, and return the compiled step.

    - `group_sizes`: process group's name -> number of ranks.
    - `regions`: for regional_inductor, patterns of the modules to compile. Without patterns, each attention operator is
      compiled.

    Raises MachineError if this machine cannot compile the graph, and PassError if Inductor cannot compile it anywhere.
    """
    on_cpu = not any(device.type == "cuda" for device in _devices(module))
    if on_cpu and (problem := compiler_problem()):
        raise MachineError(
            "Inductor cannot compile for this CPU without a C++ compiler",
            expected="a compiler of a one-line program: the command in CXX, or else g++",
            found=problem,
            fix="install g++, or name another compiler in CXX; see `bitproof doctor`",
        )
    folder = tempfile.mkdtemp(prefix="bitproof-inductor-")
    try:
        # The graph has its own backward, so autograd need not record the calls.
        with settings_in(folder), _named_groups(group_sizes), torch.no_grad():
            step, facts = compile_whole(module) if backend == "inductor" else compile_regions(module, regions)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        # KeyboardInterrupt and its like are no failures of the compiler.
        if isinstance(error, BitproofError) or not isinstance(error, Exception):
            raise
        raise _refusal(module, backend, on_cpu, error) from error
    # Each rank compiles for its own GPU: the hash must not depend on the index of that GPU.
    index = next((device.index for device in _devices(module) if device.type == "cuda"), None)
    facts |= {"launches": count_launches(Path(folder)), "generated_hash": hash_generated(Path(folder), index)}
    compiled = Compiled(step, Path(folder), {"backend": backend} | facts)
    weakref.finalize(compiled, _remove, folder, os.getpid())
    return compiled


def load_compiled(files: Mapping[str, bytes], facts: Mapping[str, Any], load: Callable[[Path], Step]) -> Compiled:
    """Load a compiled step from files, without compiling anything. This executes the code in the files.

    - `files`: the content of each file, by its path.
    - `facts`: the facts of the step when `compile_for` compiled it. The fact `generated_hash` is the hash of the code.
    - `load`: a function that loads the step from the folder of the files.

    Raises ValueError if the code has another hash, WouldCompileError if the files lack a kernel, and any exception that
    the code raises when it is loaded.
    """
    folder = tempfile.mkdtemp(prefix="bitproof-inductor-")
    try:
        for path, content in files.items():
            Path(folder, path).parent.mkdir(exist_ok=True)
            Path(folder, path).write_bytes(content)
        # Before any of the code runs: a changed file must not be executed.
        _refuse_other_code(Path(folder), facts)
        with settings_in(folder):
            step = load(Path(folder))
        # A region's pickle has code of its own, which is written into the folder before it runs.
        _refuse_other_code(Path(folder), facts)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    compiled = Compiled(step, Path(folder), dict(facts))
    weakref.finalize(compiled, _remove, folder, os.getpid())
    return compiled


def _refuse_other_code(folder: Path, facts: Mapping[str, Any]) -> None:
    if (found := hash_generated(folder)) != facts["generated_hash"]:
        raise ValueError(f"code of another hash than was compiled: {found}, not {facts['generated_hash']}")


@dataclass(frozen=True)
class CompiledHalves:
    """A compiled step whose forward and backward were compiled separately. It is called with the graph's inputs.

    `read_again` has the indices of the inputs that backward reads.
    """

    forward: Compiled
    backward: Compiled
    read_again: tuple[int, ...]

    def __call__(self, *inputs: Any) -> Any:
        return run_halves(self.forward, self.backward, self.read_again, *inputs)

    @property
    def facts(self) -> dict[str, object]:
        facts = {"forward": self.forward.facts, "backward": self.backward.facts}
        # Reports and precompiled steps state a single hash for a step.
        code = "".join(half["generated_hash"] for half in facts.values())
        return facts | {"generated_hash": hashlib.sha256(code.encode()).hexdigest()}


def compile_halves(
    module: GraphModule,
    backend: Literal["inductor", "regional_inductor"],
    group_sizes: Mapping[str, int],
    regions: tuple[str, ...] = (),
) -> CompiledHalves:
    """Compile both halves of a partitioned graph, as `compile_for` compiles a graph.

    Raises MachineError and PassError as `compile_for` does. Also raises PassError if forward determines a size that
    backward reads.
    """
    halves = divide(module)
    given = {node.name: node.meta["val"] for node in halves.backward.graph.find_nodes(op="placeholder")}
    if sizes := [name for name, value in given.items() if isinstance(value, SYMBOLIC_SCALARS)]:
        raise PassError(
            f"{backend} cannot compile a half of a step if the other half determines its sizes",
            expected="only tensors between forward and backward, as in a step without experts",
            found=f"{len(sizes)} sizes, the first of them {sizes[0]}",
            fix="choose the backend fx, or the system graph, which is compiled as one",
        )
    # Each half has a folder of its own, and so a hash of its own.
    forward, backward = (compile_for(half, backend, group_sizes, regions) for half in (halves.forward, halves.backward))
    return CompiledHalves(forward, backward, tuple(halves.read_again))


def _remove(folder: str, owner: int) -> None:
    # A rank that was forked inherits the finalizer, but must not remove its parent's files.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def compile_whole(module: GraphModule) -> tuple[Step, dict[str, Any]]:
    values = _input_values(module)
    lowered = _functional(module, values)
    with compiling(values[0].fake_mode):
        compiled = compile_whole_graph(lowered, values)
    return compiled, {"nodes_compiled": len(lowered.graph.nodes)}


def compile_regions(module: GraphModule, patterns: tuple[str, ...]) -> tuple[GraphModule, dict[str, Any]]:
    """Compile the regions of a copy of the graph, and return (the copy, facts for the report).

    The rest of the copy runs in eager. `patterns` choose the modules that are regions. Without patterns, each attention
    operator is a region. Raises PassError if there is no region.
    """
    module = _copy_graph(module)
    _unshare_nested_graphs(module)
    region_of = marked_by(patterns, module.graph) if patterns else _attention_region
    regions = {node: region for node in module.graph.nodes if (region := region_of(node)) is not None}
    if not regions:
        raise PassError(
            "there is nothing to compile",
            expected=f"calls of modules that {', '.join(patterns)} matches"
            if patterns
            else "a graph with an attention operator, which regional_inductor compiles",
            found="none",
            fix="correct pipeline.regions in the case" if patterns else "mark regions in the case, or choose fx",
        )
    for node, region in regions.items():
        # torch joins adjacent nodes with the same region to a submodule, and compiles that.
        node.meta["custom"] = {"compile_with_inductor": {"inductor_region": region}}
    values, names = _input_values(module), {node.name for node in regions}
    # Nodes with new names are the calls of compiled regions, apart from those that pick an item of a region's results.
    before = {node.name for node in module.graph.nodes}
    with compiling(values[0].fake_mode):
        compiled = compile_marked_regions(module, values)
    # A marked node that torch left out of its regions would run in eager, and the report would not show it.
    calls = [node for node in compiled.graph.nodes if node.op == "call_function"]
    left = [node.name for node in calls if node.name in names]
    assert not left, f"not compiled: {left}"
    made = [node for node in calls if node.name not in before and node.target is not operator.getitem]
    return compiled, {"regions_compiled": len(made), "nodes_compiled": len(regions)}


def _attention_region(node: Node) -> str | None:
    if (
        node.op == "call_function"
        and not isinstance(node.target, HigherOrderOperator)
        and (attends(node) or attends_backward(node))
    ):
        return node.name
    return _flex_region(node)


def _flex_region(node: Node) -> str | None:
    if isinstance(node.target, HigherOrderOperator) and (attends(node) or attends_backward(node)):
        return node.name
    if node.op == "get_attr":
        # A nested graph belongs to the operator that runs it.
        return next((region for user in node.users if (region := _flex_region(user))), None)
    return None


def _unshare_nested_graphs(module: GraphModule) -> None:
    # A region contains the references to its nested graphs; a shared reference would belong to two regions.
    for node in [node for node in module.graph.nodes if isinstance(node.target, HigherOrderOperator)]:
        for shared in [x for x in node.all_input_nodes if x.op == "get_attr" and len(x.users) > 1]:
            with module.graph.inserting_before(node):
                own = module.graph.get_attr(str(shared.target))
            own.meta = dict(shared.meta)
            node.replace_input_with(shared, own)


def _functional(module: GraphModule, values: list[Any]) -> GraphModule:
    """Return `module` traced again as a functional graph, decomposed into operators that Inductor lowers.

    Each in-place write to an input is replaced by a copy at the graph's end. `values` are the inputs' fake values.
    """

    def run(*inputs: Any) -> Any:
        return Interpreter(module).run(*inputs, enable_io_processing=False)

    # Views stay, since Inductor lowers them; only writes must go.
    functional = torch.func.functionalize(run, remove="mutations")
    return symbolic_graph(functional, values[0].fake_mode, lowering_decompositions())(*values)


def _input_values(module: GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]


def _devices(module: GraphModule) -> set[torch.device]:
    return {value.device for value in _input_values(module)}


def _copy_graph(module: GraphModule) -> GraphModule:
    graph = Graph()
    # Only the graph is new: the copy shares values and nested graphs.
    graph.output(graph.graph_copy(module.graph, {}))
    return GraphModule(module, graph)


@contextmanager
def settings_in(folder: str | Path) -> Iterator[None]:
    """Return a context in which Inductor is deterministic, and writes its files to `folder`."""
    # A folder of its own also hides what was compiled earlier, which would otherwise be read from a cache.
    places = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    with mock.patch.dict(os.environ, places), inductor_settings(SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # deprecations in torch's own code
        yield


@contextmanager
def _named_groups(sizes: Mapping[str, int]) -> Iterator[None]:
    """Return a context for compiling, in which process groups with the names and sizes in `sizes` are registered.

    Inductor reads only the sizes. The compiled code finds the real groups by name when it runs.
    """
    with ExitStack() as registered:
        # Kept here, because torch's registry only has weak references to groups.
        groups = {name: group_of_size(size) for name, size in sizes.items()}
        for name, group in groups.items():
            register_group(name, group)
            registered.callback(unregister_group, name)
        yield


def _refusal(module: GraphModule, backend: str, on_cpu: bool, error: Exception) -> BitproofError:
    has_flex = any(_flex_region(node) for node in module.graph.nodes if node.op == "call_function")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if has_flex and on_cpu and is_inductor_error(error):
        return MachineError(
            "Inductor compiles no training step with FlexAttention on a CPU",
            expected="a GPU",
            found=found,
            fix="run on CUDA, or choose the backend fx",
        )
    return PassError(f"{backend} cannot compile the graph", found=found)
