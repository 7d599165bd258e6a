"""How to run cases, whatever they are: what launcher, session and a case's run share. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.devices import DeviceRequest
from harness.stress import Stress

Role = Literal["reference", "candidate"]
ROLES: tuple[Role, ...] = ("reference", "candidate")
OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunOptions:
    """How to run cases, whatever they are. `timeout` is in seconds a case; `inject` goes into the candidate.

    `extra_passes`, texts in the form of `graph.options.SYNTAX`, go into the candidate's graph; `dump_graphs`
    writes every graph after every pass into the run folder. `control` says when each system runs a second
    time, to tell noise from defects; `stress` lets each run once more, under the stress of `harness.stress`.
    `names`, unless empty, maps the candidate's own names to the reference's, in place of those that it declares
    itself (see `harness.names`).
    Recordings keep the values of tensors that fit the patterns `values`; each is also held against its baseline in
    the folder `baseline_dir`.
    """

    device: DeviceRequest = "auto"
    timeout: float = 600.0
    control: Literal["always", "when_different", "never"] = "always"
    inject: str | None = None
    extra_passes: tuple[str, ...] = ()
    dump_graphs: bool = False
    verbose: bool = False
    stress: Stress | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    baseline_dir: Path | None = None

    def remarks(self) -> tuple[str, ...]:
        """What readers of a report must know of how every case was run."""
        told = []
        if self.control == "never":
            told.append(
                f"--no-control: no system ran twice{' but under stress' if self.stress else ''}, "
                "so noise was not told from defects"
            )
        if self.stress:
            told.append(f"--stress: each system ran once more with {self.stress}")
        return tuple(told)
