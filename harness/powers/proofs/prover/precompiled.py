"""Reads a precompiled step from its file, so that the proof is about the same step that ranks would run.

No compiled code is loaded. A step compiled by a backend cannot be proved: see `prove.why_not`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from bitproof.harness.case import GRAPH, PRECOMPILED, Case
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.tracing.trace import StepGraph
from bitproof.harness.precompile.artifact import precompile, read_program
from bitproof.harness.systems.graph import graph_of_program


def precompiled_step(
    case: Case, system: str, device: torch.device, folder: Path | None = None
) -> tuple[StepGraph, GroupTable]:
    """Return the graph and the process groups of the precompiled step in `folder`.

    Without `folder`, precompile a step first. The determinism switches must already be set. Raises ArtifactError for a
    file that a run would refuse, and any error of precompiling.
    """
    made_as = GRAPH if system == PRECOMPILED else system
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="bitproof-prove-") as made:
            precompile(case, made_as, device, Path(made))
            return precompiled_step(case, system, device, Path(made))
    return graph_of_program(case, read_program(folder, case, made_as, device))
