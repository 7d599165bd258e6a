"""How to run cases, whatever they are: what launcher, session and a case's run share. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bitproof.harness.records import ROLES as ROLES
from bitproof.harness.records import Event
from bitproof.harness.records import Role as Role

DeviceRequest = Literal["auto", "cpu", "cuda"]
CollectivesRequest = Literal["auto", "shared", "gloo", "native"]
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class Stress:
    """How hard `disturb.stress` disturbs a run: the longest sleep in seconds, and the threads of an operator."""

    longest_sleep: float = 0.002
    num_threads: int = 1
    seed: int = 0

    def __str__(self) -> str:
        disturbed = (
            f"random sleeps of up to {self.longest_sleep * 1000:g} ms before collectives and waits, "
            "zeros instead of NaN in memory that nobody wrote"
        )
        threads = f"; {self.num_threads} threads an operator, which by itself may move bits of large sums and products"
        return disturbed + (threads if self.num_threads > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of a step is made wrong to measure its sensitivity: at most `sample` calls, for at most `seconds`.

    None stands for all calls, and for any time.
    """

    sample: int | None = None
    seconds: float | None = 600.0


@dataclass(frozen=True)
class RunOptions:
    """How to run cases, whatever they are. `timeout` is in seconds a case, and `explain_timeout` what finding
    the cause may take beside that; `inject` goes into the candidate.

    `collectives` says where ranks meet, `auto` where that is fastest; it changes no bit, but for `native`, which has
    NCCL add in an order of its own.

    `extra_passes`, texts in the form of `graph.options.SYNTAX`, go into the candidate's graph; `dump_graphs`
    writes every graph after every pass into the run folder. `control` says when each system runs a second
    time, to tell noise from defects: with "up_to_difference" only where two systems differ, and as many steps as show
    it; `stress` lets each run once more, under it.
    `names`, unless empty, maps the candidate's own names to the reference's, in place of those that it declares
    itself (see `harness.systems.names`).
    `share_gpus` lets ranks share GPUs, over gloo, where there are fewer than ranks.
    With `deep` the last step of a case that is EQUAL is replayed, and calls are told whose values the reference never
    had.
    With `every_call` all steps of such a case are, and one of these calls makes it DIFFERENT.
    With `profile` the first run of each system is profiled, into the run folder.
    `kept_graphs` is the folder of prepared graphs that are kept from run to run, None where every one shall be traced.
    `precompiled` is the folder of the step that the candidate's ranks read in place of tracing it; with
    `trust_compiled` they run code that was compiled for it, too.
    `jobs` is how many cases go side by side, with "auto" as many as find a core a rank and memory.
    `sensitivity` asks how much of a step the comparison sees, of each case that is as expected.
    Recordings keep the values of tensors that fit the patterns `values`; each is also held against its baseline in
    the folder `baseline_dir`.
    """

    device: DeviceRequest = "auto"
    collectives: CollectivesRequest = "auto"
    timeout: float = 600.0
    explain_timeout: float = 600.0
    control: Literal["always", "when_different", "up_to_difference", "never"] = "always"
    inject: str | None = None
    extra_passes: tuple[str, ...] = ()
    dump_graphs: bool = False
    verbose: bool = False
    stress: Stress | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    baseline_dir: Path | None = None
    profile: bool = False
    deep: bool = False
    every_call: bool = False
    share_gpus: bool = False
    kept_graphs: Path | None = None
    precompiled: Path | None = None
    trust_compiled: bool = False
    jobs: int | Literal["auto"] = 1
    sensitivity: Effort | None = None

    def remarks(self) -> tuple[str, ...]:
        """What readers of a report must know of how every case was run."""
        told = []
        if self.control == "never":
            told.append(
                f"--no-control: no system ran twice{' but under stress' if self.stress else ''}, "
                "so noise was not told from defects"
            )
        if self.control in ("when_different", "up_to_difference"):
            told.append(
                f"--control {self.control.replace('_', '-')}: only systems that differ ran twice, "
                "so that two agree was not seen a second time"
            )
        if self.stress:
            told.append(f"--stress: each system ran once more with {self.stress}")
        if self.share_gpus:
            told.append(
                "--share-gpus: where GPUs were fewer than ranks, ranks shared them over gloo, and NCCL did not run"
            )
        if self.profile:
            told.append("--profile: see profile/<case>.json; profiling makes the first runs' steps longer")
        return tuple(told)
