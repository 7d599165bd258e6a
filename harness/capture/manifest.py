"""Build a recording's manifest: everything that can change a bit."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bitproof.harness.capture.environment import environment_variables, redacted
from bitproof.harness.case import Case
from bitproof.harness.machine.describe import commit as commit_of_folder
from bitproof.harness.machine.describe import describe_machine
from bitproof.harness.machine.determinism import Readings
from bitproof.harness.machine.devices import Placement
from bitproof.harness.machine.gpus import agreed_facts, num_gpus
from bitproof.harness.records import GraphIdentity, MachineFacts, Manifest, Meeting, Switch, TorchCompile
from bitproof.harness.runtime.sources import own_digest


def build_manifest(
    case: Case,
    system: str,
    arm: str,
    placement: Placement,
    *,
    determinism: Mapping[str, Switch],
    graph: GraphIdentity | None,
    fault: str | None,
    systems: list[dict[str, Any]],
    stress: dict[str, int | float] | None = None,
    values: Sequence[str] = (),
    chunked: dict[str, int] | None = None,
    switches: Readings = MappingProxyType({}),
    gpus: Sequence[MachineFacts | None] = (),
    gpu_environments: Sequence[Mapping[str, str]] = (),
    alone: Sequence[int] = (),
    compiled: Sequence[TorchCompile | None] = (),
    unshown: Sequence[str] = (),
    shows_every_buffer: bool = False,
    meetings: Sequence[Meeting] | None = None,
) -> Manifest:
    """Build a recording's manifest, including facts about this machine and process.

    - `systems`: each rank's facts about its system, which become the manifest's `ranks`.
    - `switches`: the values of the switches for determinism on a rank: the lowest rank whose system changed a switch,
      or rank 0 if none did.
    - `gpus`: each rank's facts about CUDA and its libraries. Empty on a CPU.
    - `gpu_environments`: the variables that these libraries read. Empty on a CPU.

    The other arguments are fields of the manifest.
    """
    from bitproof.harness.capture.digest import ALGORITHM

    return Manifest(
        case=case.stated(),
        system=system,
        arm=arm,
        world_size=case.parallelism.world_size,
        steps=case.steps,
        device=placement.device,
        backend=placement.backend,
        collectives=placement.collectives,
        shared_gpus=placement.shared,
        machine=machine() | agreed_facts(gpus),
        commit=commit(),
        sources=own_digest(),
        environment=environment_variables()
        | {name: redacted(str(value)) for name, value in agreed_facts(gpu_environments).items()},
        determinism=dict(determinism),
        switches={when: dict(found) for when, found in switches.items()},
        graph=graph,
        fault=fault,
        ranks=systems,
        stress=stress,
        chunked=chunked,
        alone=list(alone),
        # Facts that a run does not have stay None, so that it remains comparable with older recordings.
        compiled=list(compiled) if any(compiled) else None,
        unshown=list(unshown) or None,
        shows_every_buffer=shows_every_buffer or None,
        meetings=None if meetings is None else list(meetings),
        digest=ALGORITHM,
        values=list(values),
    )


@functools.cache
def machine() -> MachineFacts:
    """Return the versions of libraries and the hardware. Creates no CUDA context: the driver's list has the names of
    GPUs.
    """
    import torch

    return describe_machine() | {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "gpus": num_gpus(),
        "architecture": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }


@functools.cache
def commit() -> str | None:
    """Return the git commit of the folder in which this process was started, or None. The commit is determined once."""
    return commit_of_folder()
