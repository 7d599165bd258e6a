"""The key under which a graph is kept: everything that decides what tracing and the passes make of a case.

Of a case tracing is shown `traced_part` alone, so that what the key leaves out cannot matter. The rest is what the
process is made of (harness/runtime/sources.py), its versions, flags and switches, and the environment variables that
numeric libraries read.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitproof.harness.capture.environment import environment_of_keys
from bitproof.harness.case import PRECOMPILED, TRACED, AdamW, Batch, Case, Chunking, Memory, Pipeline
from bitproof.harness.machine.determinism import read_switches
from bitproof.harness.machine.gpus import read_gpu_of_keys
from bitproof.harness.runtime.disk_cache import keep, read_cached
from bitproof.harness.runtime.sources import Installation, Later

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

GRAPH, NO_MIXING = "graph", "no-mixing"
"""Kinds of what is kept: a prepared graph; that no module that eager runs in chunks mixes what those hold apart."""

_FORM = 3
"""Of what is kept; another form is another key."""


@dataclass(frozen=True)
class GraphCache:
    """Where a case's graph is kept: the folder, its key, and what must be untouched until it is made."""

    folder: Path
    key: str
    installation: Installation

    def read(self, kind: str) -> Any:
        """What an earlier run kept, None where there is nothing that this process would make in the same way."""
        kept = read_cached(self.folder, kind, self.key)
        try:
            later = None if kept is None else Later.of(kept["later"])
            return kept["value"] if later is not None and later.would_load_again() else None
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("what was kept of kind %s is not used: %s", kind, error)
            return None

    def keep(self, kind: str, value: Any) -> bool:
        """Keep a value for later runs, unless what made it was edited meanwhile; returns whether it was kept."""
        later = self.installation.later()
        if later is None:
            logger.info("%s is not kept: files that it was made by changed meanwhile", kind)
            return False
        return keep(self.folder, kind, self.key, {"later": asdict(later), "value": value})

    def of_rank(self, rank: int, device: torch.device) -> GraphCache:
        """The cache of a rank that traces on its own device: on a GPU, with the GPU, its libraries and what is set now.

        The host that made the key may not touch a GPU. Each rank has graphs of its own: were one rank's read by all,
        no rank whose trace differs would be seen.
        """
        if device.type == "cpu":
            return self
        own = {"rank": rank, "gpu": read_gpu_of_keys(device), "switches": read_switches()}
        own["environment"] = environment_of_keys()
        return replace(self, key=json.dumps({"of": self.key, **own}, sort_keys=True))

    def has_no_mixing(self) -> bool:
        """Whether an earlier run looked at the modules that eager runs in chunks, and found that none mixes."""
        return self.read(NO_MIXING) is True

    def keep_no_mixing(self) -> None:
        """Let later runs know that."""
        self.keep(NO_MIXING, True)


def traced_part(case: Case) -> Case:
    """The case without what decides no graph: names, systems, verdict, steps, data, optimizer, if norms are kept."""
    return replace(
        case,
        name="traced",
        family="traced",
        reference="eager",
        candidate="eager",
        expected="EQUAL",
        differs=(),
        close_within=None,
        differs_within=None,
        reference_parallelism=None,
        resume_at=None,
        resumes_reference=False,
        requires=None,
        preload=(),
        options={},
        steps=1,
        grad_norm=False,
        batch=replace(case.batch, data=Batch().data),
        optimizer=AdamW(),
    )


def step_part(case: Case) -> Case:
    """What of `traced_part` decides the step before any pass: of chunking the dim that is left open, and no pass."""
    chunking = case.chunking and Chunking(dim=case.chunking.dim, modules="*")
    return replace(traced_part(case), chunking=chunking, memory=Memory(), pipeline=Pipeline())


def graph_cache_of(
    case: Case, folder: Path | None, installation: Installation | None, system: str = TRACED[0], device: str = "cpu"
) -> GraphCache | None:
    """Where a system's graph of a case is kept; None for one that is not: see `systems.cached_graph`.

    `device` is its type; on a GPU a rank adds what its own device is (`GraphCache.of_rank`).
    """
    is_plain = (
        system != PRECOMPILED
        and case.schedule is None
        and case.pipeline.overlap_costs is None
        and not case.pipeline.compiles
        and (device == "cpu" or case.pipeline.backend != "cuda_graph")
    )
    if folder is None or installation is None or not is_plain:
        return None
    return GraphCache(folder, _key(case, system, installation, device), installation)


def _key(case: Case, system: str, installation: Installation, device: str) -> str:
    import torch

    from bitproof.harness.machine.torch_build import torch_build

    return json.dumps(
        {
            "form": _FORM,
            "case": traced_part(case).to_dict(),
            "system": system,
            "device": device,
            "sources": installation.sources.digest,
            "others": installation.others,
            "torch": torch_build().parts(),
            "processor": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
            "python": [sys.version, sys.implementation.cache_tag, repr(sys.flags)],
            "switches": read_switches(),
            "environment": environment_of_keys(),
        },
        sort_keys=True,
    )
