"""Computes the key under which a graph is cached, from everything that decides the result of tracing and passes.

This includes a part of the case, the code, versions, torch's switches, and environment variables of numeric libraries.
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
from bitproof.harness.case import PRECOMPILED, TRACED, AdamW, Batch, Case, Chunking, Memory, Pipeline, with_plan
from bitproof.harness.machine.determinism import read_switches
from bitproof.harness.machine.gpus import read_gpu_for_keys
from bitproof.harness.runtime.disk_cache import is_kept, keep, read_cached
from bitproof.harness.runtime.sources import Installation, Later

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

GRAPH, NO_MIXING = "graph", "no-mixing"
"""Kinds of cached values: a graph, and the finding that chunked modules compute each row independently of others."""

_FORM = 3
"""Version of the format of cached values. It is part of the key, so values of an older version are never read."""


@dataclass(frozen=True)
class GraphCache:
    """The cache for a case's graph.

    - `key`: the key of the graph, as text.
    - `installation`: the source files that must not change until the graph is finished.
    """

    folder: Path
    key: str
    installation: Installation

    def read(self, kind: str) -> Any:
        """Return the value that an earlier run stored under `kind`; None if there is none, or if its code has changed
        since.
        """
        kept = read_cached(self.folder, kind, self.key)
        try:
            later = None if kept is None else Later.of(kept["later"])
            return kept["value"] if later is not None and later.would_load_again() else None
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("what was kept of kind %s is not used: %s", kind, error)
            return None

    def keep(self, kind: str, value: Any) -> bool:
        """Store a value under `kind` for later runs, unless source files were edited in the meantime.

        Return whether it was stored.
        """
        later = self.installation.later()
        # If a file was edited since, it is unknown whether its old or its new text made the value.
        if later is None:
            logger.info("%s is not kept: files that it was made by changed meanwhile", kind)
            return False
        return keep(self.folder, kind, self.key, {"later": asdict(later), "value": value})

    def of_rank(self, rank: int, device: torch.device) -> GraphCache:
        """Return the cache for a rank on a device.

        On a GPU each rank has a cache of its own. On a CPU all ranks share this cache, so it returns `self`.
        """
        if device.type == "cpu":
            return self
        # With the rank's number: if all ranks read one graph, a different trace on another rank would go unnoticed.
        # With its GPU, libraries and switches, which the host process could not add, as it may not touch a GPU.
        own = {"rank": rank, "gpu": read_gpu_for_keys(device), "switches": read_switches()}
        own["environment"] = environment_of_keys()
        return replace(self, key=json.dumps({"of": self.key, **own}, sort_keys=True))

    def has_graph(self) -> bool:
        """Whether there is a file of a kept graph. It is not read if, for example, a loaded module has changed."""
        return is_kept(self.folder, GRAPH, self.key)

    def has_no_mixing(self) -> bool:
        return self.read(NO_MIXING) is True

    def keep_no_mixing(self) -> None:
        self.keep(NO_MIXING, True)


def traced_part(case: Case) -> Case:
    """Return the case with default values in all fields that do not affect its graph, such as its name."""
    # A field that is not named here is a part of the key: so a new field of a case is never forgotten.
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


def placed_case(case: Case) -> Case:
    """Compute the best plan for a case that has `autoplace` without a plan, and return the case with the plan.

    Any other case is returned unchanged. Raises the errors of `systems.autoplace.place`.
    """
    if case.autoplace is None or case.autoplace.plan is not None:
        return case
    from bitproof.harness.systems.autoplace import place

    return with_plan(case, place(case)[0])


def step_part(case: Case) -> Case:
    """Return the case with default values in all fields that do not affect tracing.

    These are the fields that `traced_part` resets, and those that affect only passes.
    """
    # Tracing reads the chunked dim. The choice of modules belongs to the chunk pass.
    chunking = case.chunking and Chunking(dim=case.chunking.dim, modules="*")
    return replace(traced_part(case), chunking=chunking, memory=Memory(), pipeline=Pipeline())


def graph_cache_of(
    case: Case, folder: Path | None, installation: Installation | None, system: str = TRACED[0], device: str = "cpu"
) -> GraphCache | None:
    """Return the cache for the graph of a case's system; None if such a graph is never cached.

    `device` is a device type. On a GPU, each rank adds its own device to the key (`GraphCache.of_rank`).
    """
    # A precompiled step has a file of its own. The others are never kept: see the top of `cached_graph.py`.
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

    # `sources` and `others` are the code. The entries after them may change the operators that torch chooses.
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
