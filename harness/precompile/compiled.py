"""Writes and reads the files that Inductor generated for a step: Python code and compiled C++ kernels.

All of them are in a single file beside the step:

    DIR/compiled.bitproof    {"parts": [{"main": path, "files": {path: base64}}], "read_again": [...] or null}

A step has one part, or two: forward and backward. With two parts, `read_again` has the indices of the inputs that
backward reads, too. If a part is compiled region by region, it has two entries instead of "main": "graph", the graph
around the regions as data, and "regions", torch's pickle of each region.

Needs:    the sha256 of `compiled.bitproof`, which the step's file has, and permission to run code.
Promises: only the stored files run, and nothing is compiled: a kernel that is not among them is refused.
Refuses:  to run anything without permission. A hash shows that code is unchanged, but not that it is harmless.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from bitproof.harness.case import Case
from bitproof.harness.errors import ArtifactError, CaseError
from bitproof.harness.graph.backend.allowed import ALLOWED
from bitproof.harness.graph.backend.backends import Compiled, CompiledHalves, Step, load_compiled
from bitproof.harness.graph.graph_json import graph_from_json, graph_to_json, refuse_operators, region
from bitproof.harness.precompile import file
from bitproof.harness.records import PassReport
from bitproof.harness.torch_inductor import (
    WouldCompileError,
    generated_module,
    load_generated,
    load_region,
    pickled_region,
)

_KEPT = (".py", ".so")
_PATH = re.compile(r"[a-z0-9]{2}/[\w.]+\.(py|so)")
"""The form of a path of a generated file, relative to Inductor's folder."""


def refuse_device(case: Case, device: torch.device) -> None:
    """Raise CaseError if a case would be compiled for a GPU: such code cannot be stored yet."""
    if case.pipeline.compiles and device.type != "cpu":
        raise CaseError(
            f"the step of case {case.name} is compiled for {device.type}, and such code is not precompiled",
            expected="--device cpu, or pipeline.backend fx",
            found=f"--device {device.type}, pipeline.backend {case.pipeline.backend}",
        )


def write(run: Any, folder: Path) -> str:
    """Write the code `run`, which Inductor compiled, into a folder. Returns the file's sha256.

    Raises ArtifactError if the code needs anything besides the generated files.
    """
    parts = [run.forward, run.backward] if isinstance(run, CompiledHalves) else [run]
    value = {
        "parts": [_part(part) for part in parts],
        "read_again": run.read_again if isinstance(run, CompiledHalves) else None,
    }
    return file.write(folder, value, file.COMPILED).content


def _part(part: Compiled) -> dict[str, object]:
    if isinstance(part.step, GraphModule):
        return _regional_part(part.step, part.folder)
    name, besides = generated_module(part.step)
    found = _files_in(part.folder)
    main = [path for path in found if Path(path).stem == name]
    if besides or len(main) != 1:
        raise ArtifactError(
            "what Inductor compiled is more than the code that it generated, and has no form as files",
            expected="code that needs nothing but its inputs",
            found=", ".join(besides) or f"{len(main)} files of the name {name}",
            fix="run the case without precompiling it",
        )
    return {"main": main[0], "files": found}


def _regional_part(step: GraphModule, folder: Path) -> dict[str, object]:
    graph = Graph()
    graph.output(graph.graph_copy(step.graph, {}))
    regions: list[str] = []
    try:
        for node in graph.nodes:
            if node.op == "call_function" and (pickled := pickled_region(node.target)) is not None:
                node.target, node.args = region, (len(regions), *node.args)
                regions.append(base64.b64encode(pickled).decode())
        plain = graph_to_json(GraphModule(step, graph))
        refuse_operators(plain, ALLOWED)
    # torch pickles a region only if it has a cache entry for it, and raises different errors.
    except Exception as error:
        raise ArtifactError(
            "a step that Inductor compiled region by region has no form as files",
            expected="regions that torch can pickle, and calls of operators between them",
            found=f"{type(error).__name__}: {getattr(error, 'what', error)}",
            fix="run the case without precompiling it",
        ) from error
    return {"graph": plain, "regions": regions, "files": _files_in(folder)}


def _files_in(folder: Path) -> dict[str, str]:
    # Only what runs is stored: Inductor's folder also has its C++ sources.
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.suffix in _KEPT}
    return {name: base64.b64encode(path.read_bytes()).decode() for name, path in sorted(found.items())}


def read(folder: Path, content: str, passes: Sequence[PassReport], trust_compiled: bool) -> Compiled | CompiledHalves:
    """Load the compiled code of a precompiled step.

    - `content`: the sha256 that the file must have.
    - `passes`: the reports of the step's passes.
    - `trust_compiled`: whether the code may run.

    Raises ArtifactError if the code may not run, or cannot be loaded without compiling anything. Also raises it if the
    file is missing or damaged, or belongs to another step.
    """
    where = str(folder / file.COMPILED)
    # Loading executes the code, so permission is checked first.
    if not trust_compiled:
        raise ArtifactError(
            "the precompiled step is compiled code, and nothing says that it may run",
            expected="--trust-compiled",
            found=where,
            fix="add --trust-compiled, if you trust everyone who can write the folder",
        )
    found = file.read(folder, file.COMPILED)
    if found.content != content:
        raise ArtifactError(
            "the compiled code beside the precompiled step is not the step's own",
            expected=f"sha256 {content}",
            found=found.content,
            where=where,
        )
    try:
        facts = next(entry.facts for entry in passes if entry.name == "backend")
        read_again, parts = found.value["read_again"], found.value["parts"]
        # A step with a single part has no `read_again`, and the report's facts are those of this part.
        facts_of_parts = [facts] if read_again is None else [facts["forward"], facts["backward"]]
        loaded = [
            load_compiled(_files(part), f, partial(_load, part)) for part, f in zip(parts, facts_of_parts, strict=True)
        ]
        return loaded[0] if read_again is None else CompiledHalves(loaded[0], loaded[1], tuple(read_again))
    except WouldCompileError as error:
        raise ArtifactError(
            "the precompiled step's compiled code does not fit this machine: a kernel would have to be compiled",
            expected="the compiler and the processor that the step was made with",
            found=str(error),
            where=where,
        ) from error
    # The stored code runs while it is loaded, so it may raise anything.
    except Exception as error:
        raise ArtifactError(
            "the precompiled step's compiled code does not load",
            found=f"{type(error).__name__}: {error}",
            where=where,
        ) from error


def _load(part: Any, folder: Path) -> Step:
    if "regions" not in part:
        return load_generated(folder / _path(part["main"]))
    step = graph_from_json(part["graph"], ALLOWED)
    loaded = [load_region(base64.b64decode(pickled, validate=True)) for pickled in part["regions"]]
    for node in step.graph.find_nodes(op="call_function", target=region):
        index, *inputs = node.args
        node.target, node.args = loaded[index], tuple(inputs)
    step.recompile()

    def run(inputs: list[Any]) -> Any:
        given = list(inputs)
        inputs.clear()
        return step(*given)

    return run


def _files(part: Any) -> dict[str, bytes]:
    try:
        return {_path(path): base64.b64decode(text, validate=True) for path, text in part["files"].items()}
    except binascii.Error as error:
        raise ValueError(f"a file that is no base64: {error}") from error


def _path(path: str) -> str:
    if not _PATH.fullmatch(path):
        raise ValueError(f"a path that Inductor would not write: {path!r}")
    return path
