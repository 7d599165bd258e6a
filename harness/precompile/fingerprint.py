"""The fingerprint of a precompiled step: everything that determines the step, or whether it can be read.

    form          version of the file's content            passes        names, settings, sha256 of each source
    system        graph or joint                           sources       sha256 of bitproof's own files
    world_size    number of ranks                          backend       what runs the graph, such as Inductor
    model         family, sizes, attention                 device        cpu or cuda
    shapes        rows and tokens of a rank's batch        capability    instruction set or GPU
    dtypes        of compute and reductions                torch         version, commit, build, sha256 of its files
    parallelism   distribution of the model over ranks     python        version
    chunking      modules and dim split in two             switches      determinism, precision
    memory        saved, recomputed, offloaded values      environment   variables that torch reads
    pipeline      the optional passes                      seed          of the case
    compiler      and processor, for compiled code         costs         sha256 of an overlap schedule's cost model
    start_up      sha256 of code run at Python's start

Errors name the first field that differs. A case's names, steps, data, optimizer and expected verdict may differ, since
they do not affect the graph.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bitproof.harness.capture.environment import environment_of_keys
from bitproof.harness.case import Case
from bitproof.harness.compare.same_case import leaf_differences
from bitproof.harness.errors import ArtifactError
from bitproof.harness.graph.pipeline import PassRow
from bitproof.harness.machine.compiler import compiled_for
from bitproof.harness.machine.determinism import read_switches
from bitproof.harness.machine.torch_build import torch_build
from bitproof.harness.runtime.sources import own_digest, start_up_code, torch_digest
from bitproof.harness.systems.graph import column_of
from bitproof.harness.systems.graph_key import traced_part

FORM = 2

Fields = Mapping[str, Any]
"""A fingerprint's fields, as JSON values."""

UNDECIDED = (
    *("name", "family", "reference", "candidate", "expected", "differs", "close_within", "differs_within"),
    *("requires", "steps", "grad_norm", "optimizer", "resume_at", "resumes_reference"),
    "reference_parallelism",
)
"""Fields of a case that do not affect the graph."""
_CALLED = {"batch": "shapes", "precision": "dtypes"}

_PREFIXES = ("TORCH", "PYTORCH", "ATEN_")
"""Prefixes of environment variables that may determine which operators torch chooses.

Other variables, such as those for threads and transports, may differ between precompiling and a run.
"""
_OF_STRESS = ("fill_uninitialized_memory", "num_threads")
"""Switches that a run under scheduling stress changes. They do not affect which operators torch chooses."""


def fingerprint_of(case: Case, system: str, device: torch.device) -> Fields:
    """Return the fingerprint of a case's step in this process. Determinism switches must be set before this call."""
    decided = {
        _CALLED.get(name, name): value for name, value in traced_part(case).to_dict().items() if name not in UNDECIDED
    }
    # The data decides values, but no shape.
    decided["shapes"] = {name: value for name, value in decided["shapes"].items() if name != "data"}
    fields = {
        "form": FORM,
        "system": system,
        "world_size": case.parallelism.world_size,
        **decided,
        "backend": case.pipeline.backend,
        "compiler": compiled_for() if case.pipeline.compiles else None,
        "passes": [_describe(row) for row in column_of(case, system)],
        "costs": _digest_of(Path(case.pipeline.overlap_costs)) if case.pipeline.overlap_costs else None,
        "sources": own_digest(),
        "device": device.type,
        "capability": _capability(device),
        "torch": [*torch_build().parts(), torch_digest()],
        "start_up": start_up_code(),
        "python": [sys.implementation.name, sys.version],
        "switches": {name: value for name, value in read_switches().items() if name not in _OF_STRESS},
        "environment": {name: text for name, text in environment_of_keys().items() if name.startswith(_PREFIXES)},
    }
    return dict(json.loads(json.dumps(fields)))  # tuples become lists, as in a fingerprint from a file


def digest_of(fields: Fields) -> str:
    """Return the sha256 of a fingerprint, for messages."""
    return hashlib.sha256(_text(fields).encode()).hexdigest()


def _text(value: Any) -> str:
    # Compared as text, since in Python, for example, True == 1.
    return json.dumps(value, sort_keys=True)


def refuse_other(made: Fields, here: Fields, where: str) -> None:
    """Raise ArtifactError if a stored fingerprint, `made`, differs from that of this run, `here`.

    The error names the first field that differs. `where` is the path of the file, for the error.
    """
    # A field that only one of both has differs as well: another version of bitproof wrote the file.
    for name in (*here, *(name for name in made if name not in here)):
        left, right = made.get(name), here.get(name)
        if _text(left) == _text(right) and name in made and name in here:
            continue
        path, (theirs, ours) = _first_difference(name, left, right)
        raise ArtifactError(
            f"the precompiled step was made for something else: {name.replace('_', ' ')}",
            expected=f"{path}={ours!r}, as this run has it",
            found=f"{path}={theirs!r}",
            where=where,
        )


def _first_difference(name: str, left: Any, right: Any) -> tuple[str, tuple[Any, Any]]:
    if isinstance(left, list) and isinstance(right, list):
        for place in range(max(len(left), len(right))):
            pair = [side[place] if place < len(side) else None for side in (left, right)]
            # The first differing item, so that the error shows it and not the whole list.
            if pair[0] != pair[1]:
                return _first_difference(f"{name}[{place}]", *pair)
    return next(iter(leaf_differences({name: (left, right)})), (name, (left, right)))


def _describe(row: PassRow) -> Fields:
    source = Path(inspect.getsourcefile(row.run) or "")
    # A pass may be a package: then all of its files decide, such as a table of costs.
    files = sorted(source.parent.rglob("*")) if source.name == "__init__.py" else [source]
    digest = hashlib.sha256()
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{os.path.relpath(file, source.parent)}\0{_digest_of(file)}\0".encode())
    return {"name": row.__name__, "settings": row.settings, "source": digest.hexdigest()}


def _digest_of(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _capability(device: torch.device) -> list[Any]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), list(torch.cuda.get_device_capability(device))]
    # torch chooses its CPU kernels by the instruction set.
    return [platform.machine(), torch.backends.cpu.get_cpu_capability()]
