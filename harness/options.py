"""Defines the options of a run. Does not import torch, since the process that starts the ranks needs none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bitproof.harness.errors import UsageError
from bitproof.harness.records import ROLES as ROLES
from bitproof.harness.records import Event
from bitproof.harness.records import Role as Role
from bitproof.harness.runtime.disk_cache import default_folder
from bitproof.harness.settings import CHECKS, MACHINE, MORE, PIPELINE, TIME, option, setting, settings
from bitproof.harness.torch_versions import torch_version, warning_of
from bitproof.harness.user_code.names import NamesInFile, names_of

DeviceRequest = Literal["auto", "cpu", "cuda"]
CollectivesRequest = Literal["auto", "shared", "gloo", "native"]
ControlRequest = Literal["always", "when_different", "never"]
Control = Literal["always", "when_different", "never", "up_to_difference", "logged"]
LOGS_STEP = "up_to_difference", "logged"
"""Values of `control` with which a system's second run logs the operator calls of the first differing step."""
OnEvent = Callable[[Event], None]

SYNTAX = "MODULE_OR_FILE:FUNCTION[@before=PASS|@after=PASS]"
"""Syntax for a user's graph pass and its position in the pipeline."""

MAX_SECONDS = 1e9
MAX_JOBS = 999


@dataclass(frozen=True, kw_only=True)
class Stress:
    """How strongly a stress run disturbs the timing (see `disturb.stress`).

    - `longest_sleep`: longest random sleep, in seconds.
    - `num_threads`: threads per operator.
    - `seed`: seed of the random sleeps.
    """

    longest_sleep: float = 0.002
    num_threads: int = 1
    seed: int = 0

    def __str__(self) -> str:
        disturbed = (
            f"random sleeps of up to {self.longest_sleep * 1000:g} ms before collectives and waits, "
            "zeros instead of NaN in uninitialized memory"
        )
        threads = f"; {self.num_threads} threads an operator, which by itself may move bits of large sums and products"
        return disturbed + (threads if self.num_threads > 1 else "")


def check_seconds(value: float) -> str:
    """Return an error message if the number of seconds is NaN or too large to wait for; "" if it is valid."""
    return "" if value <= MAX_SECONDS else f"{value} is not a number of seconds up to {MAX_SECONDS:g}."  # nor is NaN


def check_jobs(value: int | str) -> str:
    """Return an error message if `value` is not valid for `-j`; "" if it is valid: 1 to MAX_JOBS, or "auto"."""
    text = str(value)
    fits = text == "auto" or (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_JOBS)
    return "" if fits else f"{text} is neither a number from 1 to {MAX_JOBS} nor auto."


def _read_control(control: ControlRequest | None, no_control: bool) -> ControlRequest:
    if no_control and control is not None:
        raise UsageError("--control and --no-control contradict each other", fix="leave out one of them")
    return "never" if no_control else control or "always"


def _control_options(control: str) -> dict[str, object]:
    # Users cannot give `up_to_difference`; this option comes closest.
    given = {"when_different": control, "up_to_difference": "when_different"}
    return {"control": given.get(control), "no_control": control == "never"}


def _read_stress(stress: bool, stress_threads: int | None) -> Stress | None:
    if stress_threads is not None and not stress:
        raise UsageError("--stress-threads needs --stress", fix="give --stress too")
    return Stress(num_threads=stress_threads or 1) if stress else None


def _stress_options(stress: Stress | None) -> dict[str, object]:
    # A single thread is the default, so `--stress` alone restores it.
    several = stress is not None and stress.num_threads > 1
    return {"stress": stress is not None, "stress_threads": stress.num_threads if stress and several else None}


@dataclass(frozen=True)
class RunOptions:
    """The options of a run. Each field has a help text; some need more explanation.

    - `timeout`: seconds for each case. `explain_timeout`: additional seconds to find the cause of a difference.
    - `control`: when each system runs a second time. Two values are for internal use. With "up_to_difference", a
      differing system runs again, up to the first differing step. With "logged", each system runs again after the first
      comparison. Both log the operator calls of the differing step, so that the search for its cause need not run it
      again.
    - `names`: candidate's name -> reference's name. If not empty, it replaces the mapping that the candidate declares.
    - `kept_graphs`: folder that caches traced graphs; None to trace every graph.
    - `active`: checks that examine each case after its verdict, in this order.
    """

    inject: str | None = setting(
        None, "--inject", PIPELINE, "Plant a deliberate defect in the candidate.", metavar="FAULT"
    )
    extra_passes: tuple[str, ...] = setting(
        (),
        "--extra-pass",
        PIPELINE,
        "Run a pass of your own on the candidate's graph, by default after all passes that rewrite it. Repeatable.",
        keyword="extra_passes",
        metavar=SYNTAX,
        names_code=True,
    )
    dump_graphs: bool = setting(
        False,
        "--dump-graphs",
        PIPELINE,
        "Write the graph after every pass into the run folder, with diffs.",
    )
    kept_graphs: Path | None = settings(
        None,
        option(
            "--no-kept-graph",
            PIPELINE,
            "Trace every graph again; neither read nor write the graph cache ($BITPROOF_CACHE).",
            kind=bool,
            default=False,
        ),
        read=lambda no_kept_graph: None if no_kept_graph else default_folder(),
        to_options=lambda folder: {"no_kept_graph": folder is None},
    )
    precompiled: Path | None = settings(
        None,
        option(
            "--precompiled",
            PIPELINE,
            "Let the candidate's ranks load this precompiled step instead of tracing one.",
            kind=str | Path | None,
            metavar="DIR",
        ),
        read=lambda precompiled: None if precompiled is None else Path(precompiled),
        to_options=lambda folder: {"precompiled": folder},
    )
    trust_compiled: bool = setting(
        False, "--trust-compiled", PIPELINE, "Allow a precompiled step to run its compiled code."
    )
    device: DeviceRequest = setting("auto", "--device", MACHINE, "Where ranks compute.")
    share_gpus: bool = setting(
        False,
        "--share-gpus",
        MACHINE,
        "With --device cuda, let ranks share GPUs over gloo if there are too few.",
    )
    collectives: CollectivesRequest = setting(
        "auto",
        "--collectives",
        MACHINE,
        "How ranks communicate: by shared memory or gloo's sockets, with the same bits; native: with NCCL's own sums.",
    )
    control: Control = settings(
        "always",
        option(
            "--control",
            CHECKS,
            "When each system runs twice, to distinguish noise from defects. [default: always]",
            kind=ControlRequest | None,
        ),
        option(
            "--no-control",
            CHECKS,
            "Never run a system twice: --control never.",
            kind=bool,
            default=False,
            command_line_only='control="never" says it',
        ),
        read=_read_control,
        to_options=_control_options,
    )
    stress: Stress | None = settings(
        None,
        option(
            "--stress",
            CHECKS,
            "Run each system once more, with random sleeps and with other values in uninitialized memory.",
            kind=bool,
            default=False,
        ),
        option(
            "--stress-threads",
            CHECKS,
            "Under stress, use N threads per operator. Correct kernels may differ, too.",
            kind=int | None,
            metavar="N",
            least=2,
        ),
        read=_read_stress,
        to_options=_stress_options,
    )
    names: Mapping[str, str] = settings(
        {},
        option(
            "--names",
            CHECKS,
            "JSON object that maps the candidate's names to the reference's.",
            kind=Mapping[str, str] | str | Path | None,
            typed=Path | None,
            metavar="FILE",
        ),
        read=lambda names: names_of(names),
        to_options=lambda names: {"names": names.file if isinstance(names, NamesInFile) else None},
    )
    values: tuple[str, ...] = setting(
        (),
        "--values",
        CHECKS,
        "Keep the values of these tensors: kinds, as in grad,param, or a pattern over step/kind/name, as in "
        "'*/grad/layers.1.*'. Repeatable. [default: none; of a baseline, the first and the last step]",
        metavar="PATTERN",
    )
    every_call: bool = setting(
        False,
        "--every-call --deep",
        CHECKS,
        "Compare every operator call of an EQUAL case: values that the reference never had make it DIFFERENT.",
    )
    verify: bool = setting(
        True,
        "--verify/--no-verify",
        CHECKS,
        "Verify a cause: run the step again with values exchanged at the blamed call.",
    )
    checks: tuple[str, ...] = setting(
        (),
        "--check",
        CHECKS,
        "Let a check of your own judge each case, too; its options become options of this command. Repeatable.",
        keyword="checks",
        kind=tuple[str | type[Any], ...],
        typed=tuple[str, ...],
        metavar="FILE.py:CLASS",
        names_code=True,
    )
    timeout: float = setting(
        600.0, "--timeout", TIME, "Time limit of a case.", metavar="SECONDS", least=1, problem=check_seconds
    )
    explain_timeout: float = setting(
        600.0,
        "--explain-timeout",
        TIME,
        "Time limit of the search for a cause, after the verdict.",
        metavar="SECONDS",
        least=1,
        problem=check_seconds,
    )
    jobs: int | Literal["auto"] = settings(
        1,
        option(
            "--jobs -j",
            TIME,
            "Run N cases at the same time; auto: as many as have a core per rank, and memory.",
            kind=str,
            default="1",
            metavar="N|auto",
            problem=check_jobs,
            repeats=False,
            command_line_only="a call runs one case",
        ),
        read=lambda jobs: "auto" if jobs == "auto" else int(jobs),
        to_options=lambda jobs: {"jobs": str(jobs)},
    )
    profile: bool = setting(False, "--profile", MORE, "Write a trace of each rank's time, for Perfetto.")
    active: tuple[Any, ...] = ()
    verbose: bool = setting(False, "--verbose -v", MORE, "Write the passes' debug logs to the logs.")

    def of_run(self, role: Role, *, is_stressed: bool) -> RunOptions:
        """Return the options for a single run of a system.

        Faults, extra passes and names apply only to the candidate, and stress only if `is_stressed`.
        """
        mine = replace(self, stress=self.stress if is_stressed else None, checks=(), active=())
        return mine if role == "candidate" else replace(mine, inject=None, extra_passes=(), names={})

    @property
    def parts(self) -> tuple[Any, ...]:
        """The options of the active checks; the command line that repeats a run contains them."""
        return tuple(check.options for check in self.active)

    def remarks(self) -> tuple[str, ...]:
        """Return remarks for the report on how all cases were run, for example with an untested version of torch."""
        lines = [warning] if (warning := warning_of(torch_version())) else []
        if self.control == "never":
            lines.append(
                f"--no-control: no system ran twice{' but under stress' if self.stress else ''}, "
                "so noise was not distinguished from defects"
            )
        if self.control in ("when_different", "up_to_difference"):
            lines.append(
                f"--control {self.control.replace('_', '-')}: only systems that differ ran twice, "
                "so that two agree was not seen a second time"
            )
        if self.stress:
            lines.append(f"--stress: each system ran once more with {self.stress}")
        if self.share_gpus:
            is_nccl = os.environ.get("BITPROOF_SHARED_NCCL") == "1"
            over = "NCCL, as if each were on a host of its own" if is_nccl else "gloo, and NCCL did not run"
            lines.append(f"--share-gpus: where GPUs were fewer than ranks, ranks shared them over {over}")
        if self.profile:
            lines.append("--profile: see profile/<case>.json; profiling makes the first runs' steps longer")
        return tuple(lines)
