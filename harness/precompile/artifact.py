"""Precompile a step in a process without ranks. A run later reads the step on each rank, or in one process for all
ranks.

1. Replace an old step's file by a note, so that no old step is left if precompiling fails.
2. Trace the step for the first and for the last rank, whose coordinates in the mesh differ on every axis. Both traces
   must have the same code. A rank's coordinates may be in its state, such as a buffer, but not in its code.
3. Run the passes on the first rank's graph.
4. Write the graph and its fingerprint as data. The graph may only call operators that `graph.backend.allowed` lists.
5. If Inductor compiles the step, write the generated code into a second file (`harness.precompile.compiled`).

When a run reads the step, it checks that the file is complete, that the fingerprints of file and run are equal, that
each operator is allowed, and that the resulting code has the stored hash. Nothing is traced or compiled, and no pass
runs. Compiled code runs only with permission.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from bitproof.harness.case import Case, refuse_unwritten
from bitproof.harness.disturb.entry import catalogue
from bitproof.harness.errors import ArtifactError, BitproofError, UsageError
from bitproof.harness.graph.backend.allowed import ALLOWED
from bitproof.harness.graph.collector import gc_paused
from bitproof.harness.graph.graph_json import UnkeptError, refuse_operators
from bitproof.harness.precompile import compiled, file
from bitproof.harness.precompile.fingerprint import Fields, digest_of, fingerprint_of, refuse_other
from bitproof.harness.records import Artifact
from bitproof.harness.runtime.sources import own_digest, read_sources, runs_its_text
from bitproof.harness.systems.cached_graph import program_from_json, program_to_json
from bitproof.harness.systems.graph import TracedStep, finish, trace
from bitproof.harness.systems.graph_program import GraphProgram, Layout, code_hash

Enter = Callable[[str], None]


class Precompiled(NamedTuple):
    """Facts about the written file, and the seconds that precompiling took.

    `trace_seconds` is (seconds of the first rank's trace, seconds of the last rank's trace).
    """

    artifact: Artifact
    trace_seconds: tuple[float, float]
    pass_seconds: float
    write_seconds: float


def precompile(
    case: Case,
    system: str,
    device: torch.device,
    folder: Path,
    fault: str | None = None,
    enter: Enter = lambda place: None,
) -> Precompiled:
    """Trace and compile a case's step, and write it into a folder. Returns facts about the file.

    Determinism switches must be set before this call. `fault` is the name of a fault, to test that a step is refused if
    it differs between ranks. The fault changes the traced steps of the first and of the last rank, which are then
    compared. No step is written.

    Raises:

    - CaseError: the case's steps cannot be precompiled.
    - ArtifactError: the step differs between ranks, or cannot be written as data.
    - UsageError: the fault changes both ranks' steps alike.
    - The errors of tracing and of the passes.

    After an error, the folder has a note with the error's text instead of the step.
    """
    refuse_unwritten(case)
    compiled.refuse_device(case, device)
    file.begin(folder, case.name)
    try:
        return _precompile(case, system, device, folder, fault, enter)
    except BaseException as error:
        file.note_unfinished(folder, case.name, f"{type(error).__name__}: {getattr(error, 'what', error)}")
        raise


def _precompile(
    case: Case, system: str, device: torch.device, folder: Path, fault: str | None, enter: Enter
) -> Precompiled:
    # Before tracing, so that it has the switches and variables that the traces read.
    fingerprint = fingerprint_of(case, system, device)
    last = case.parallelism.world_size - 1
    other_seconds, other_code = 0.0, None
    if last > 0:
        # Of this trace only the code is kept, so that two graphs are never in memory together.
        other = trace(case, device, enter, system, rank=last)
        other_seconds, other_code = other.seconds, _Code.of(other, case, fault, last)
        del other
    first = trace(case, device, enter, system)
    if other_code is not None:
        _refuse_ranks_apart(case, _Code.of(first, case, fault, 0), other_code, last)
    if fault is not None:
        raise UsageError(
            f"fault {fault} is the same on every rank, so no comparison of ranks can find it",
            expected="a fault that depends on the rank, such as baked-coordinate",
            found=fault,
            fix="inject it into a run: bitproof run --inject",
        )
    began = time.perf_counter()
    program = finish(first, case, device, enter=enter)
    passed = time.perf_counter()
    # The fingerprint states the sources' digest, so the running code must be these sources.
    if read_sources().own != own_digest() or not runs_its_text():
        raise ArtifactError(
            f"files that made the step of case {case.name} changed while it was made, or other code ran than they hold",
            fix="precompile the case again",
        )
    artifact = write_program(program, case, system, fingerprint, folder)
    return Precompiled(artifact, (first.seconds, other_seconds), passed - began, time.perf_counter() - passed)


def write_program(program: GraphProgram, case: Case, system: str, fingerprint: Fields, folder: Path) -> Artifact:
    """Write a program and its fingerprint into a folder, and return facts about the file.

    Raises ArtifactError if the program cannot be written as data, or the folder cannot be written.
    """
    try:
        data = program_to_json(program)
        refuse_operators(data["graph"], ALLOWED)
    except UnkeptError as error:
        raise ArtifactError(
            f"the step of case {case.name} has no form as data: {error.what}",
            expected="calls of operators that harness/graph/backend/allowed.py lists, of tensors and plain values",
            found=error.found,
            fix="run the case without precompiling it",
        ) from error
    # Before the step's own file, which has the sha256 of this one.
    code = compiled.write(program.run, folder) if case.pipeline.compiles else None
    value = {"case": case.name, "fingerprint": fingerprint, "program": data, "layout": program.layout, "compiled": code}
    read = file.write(folder, value)
    return _describe(value, read, program)


@gc_paused()
def read_program(
    folder: Path, case: Case, system: str, device: torch.device, trust_compiled: bool = False
) -> GraphProgram:
    """Read the precompiled program in a folder for a run of a case. Determinism switches must be set before this call.

    Raises ArtifactError if a file is missing, damaged, or made for something else. Also raises it for compiled code,
    unless `trust_compiled` permits that the code runs.
    """
    began = time.perf_counter()
    try:
        refuse_unwritten(case)
        return _read(folder, case, system, device, began, trust_compiled)
    except ArtifactError as error:
        # The code that raised does not know the command, so the fix and the replay are added here.
        error.fix = error.fix or f"bitproof precompile {case.name} --out {folder}, with this run's options"
        trust = " --trust-compiled" if trust_compiled else ""
        error.replay = error.replay or f"bitproof run -k {case.name} --precompiled {folder}{trust}"
        raise


def _read(
    folder: Path, case: Case, system: str, device: torch.device, began: float, trust_compiled: bool
) -> GraphProgram:
    read = file.read(folder)
    where = str(folder / file.NAME)
    # The fingerprint before the program: a file made for something else is not parsed further.
    here = fingerprint_of(case, system, device)
    try:
        fingerprint = dict(read.value["fingerprint"])
        refuse_other(fingerprint, here, where)
        program = program_from_json(read.value["program"], began, ALLOWED)
        layout = tuple(Layout(name, dtype, tuple(shape)) for name, dtype, shape in read.value["layout"])
        # The hash excludes damage, but not a file whose parts do not belong together.
        if [name for name, _, _ in layout] != [*program.parameter_names, *program.buffer_names]:
            raise ValueError("its layout is of other parameters and buffers than its graph's")
        artifact = _describe(read.value, read, program)
        code, is_compiled = read.value["compiled"], case.pipeline.compiles
        if (code is not None) != is_compiled:
            raise ValueError(f"it has {'no ' if is_compiled else ''}compiled code")
    except ArtifactError:
        raise
    except (BitproofError, AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        found = getattr(error, "found", None) or f"{type(error).__name__}: {error}"
        what = getattr(error, "what", "it is of another form")
        raise ArtifactError(f"the precompiled step says no program: {what}", found=found, where=where) from error
    # Last, since loading compiled code runs it.
    if code is not None:
        program = replace(program, run=compiled.read(folder, code, program.passes, trust_compiled))
    seconds = time.perf_counter() - began
    return replace(program, is_kept=False, layout=layout, artifact=artifact, trace_seconds=seconds)


def _describe(value: Any, read: file.Read, program: GraphProgram) -> Artifact:
    fields = value["fingerprint"]
    return Artifact(
        fingerprint=digest_of(fields),
        content=read.content,
        case=str(value["case"]),
        system=fields["system"],
        ranks=fields["world_size"],
        nodes=len(program.module.graph.nodes),
        groups=len(program.groups),
        bytes=read.num_bytes,
        compiled=value["compiled"],
    )


class _Code(NamedTuple):
    """The code of a rank's traced step, and its hash. Only the hash covers nested graphs."""

    text: str
    hash: str

    @staticmethod
    def of(traced: TracedStep, case: Case, fault: str | None, rank: int) -> _Code:
        module: GraphModule = traced.joint.module
        if fault is not None:
            from bitproof.harness.disturb.mutate import mutate

            module = mutate(_edit(fault), module, case, rank).module
        return _Code(str(module.code), code_hash(module))


def _edit(fault: str) -> Any:
    entry = catalogue().get(fault)
    if entry is None or entry.edit is None:
        raise UsageError(
            f"precompiling knows no fault {fault}",
            expected="a fault that edits the graph, such as baked-coordinate: see `bitproof faults --list`",
            found=fault,
        )
    return entry


def _refuse_ranks_apart(case: Case, first: _Code, other: _Code, last: int) -> None:
    if first.hash == other.hash:
        return
    # Equal texts with different hashes differ in a graph that is nested in them.
    lines = itertools.zip_longest(first.text.split("\n"), other.text.split("\n"), fillvalue="no more code")
    mine, theirs = next((pair for pair in lines if pair[0] != pair[1]), ("another graph nested in it",) * 2)
    raise ArtifactError(
        f"the step of case {case.name} is not the same on every rank: a rank's own coordinate stands in its code",
        expected=f"one code for all ranks; rank 0 has {mine.strip()}",
        found=f"rank {last} has {theirs.strip()}",
        where=f"code hashes {first.hash[:16]} of rank 0, {other.hash[:16]} of rank {last}",
        fix="read the coordinate from a buffer that each rank owns, and trace the step again",
        replay=f"bitproof precompile {case.name}",
    )
