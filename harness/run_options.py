"""How to run cases, whatever they are: what launcher, session and a case's run share. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.devices import DeviceRequest

Role = Literal["reference", "candidate"]
ROLES: tuple[Role, ...] = ("reference", "candidate")
OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunOptions:
    """How to run cases, whatever they are. `timeout` is in seconds a case; `inject` goes into the candidate.

    `extra_passes`, texts in the form of `graph.options.SYNTAX`, go into the candidate's graph; `dump_graphs`
    writes every graph after every pass into the run folder. `control` says when each system runs a second
    time, to tell noise from defects. Two systems that agree in every bit are each other's control, so by
    default only those that differ get one. Recordings keep the values of tensors that fit the patterns `values`;
    each is also held against its baseline in the folder `baseline_dir`.
    """

    device: DeviceRequest = "auto"
    timeout: float = 600.0
    control: Literal["when_different", "always", "never"] = "when_different"
    inject: str | None = None
    extra_passes: tuple[str, ...] = ()
    dump_graphs: bool = False
    verbose: bool = False
    values: tuple[str, ...] = ()
    baseline_dir: Path | None = None
