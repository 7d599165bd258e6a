"""A precompiled step as a proof takes it: as its file has it, so that what is proved is what ranks would read.

No compiled code is loaded. Of a step that a backend compiles there is nothing to prove: `prove.why_not` says so.
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
    """The graph that a folder's file says, and the groups that it names. Determinism switches are set before.

    Where no folder is named, the step is made now, and goes through a file as it does before a run, which is removed.
    Raises ArtifactError for a file that a run would refuse, and what precompiling raises.
    """
    made_as = GRAPH if system == PRECOMPILED else system
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="bitproof-prove-") as made:
            precompile(case, made_as, device, Path(made))
            return precompiled_step(case, system, device, Path(made))
    return graph_of_program(case, read_program(folder, case, made_as, device))
