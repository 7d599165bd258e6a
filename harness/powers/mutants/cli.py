"""`bitproof faults`: injects faults into cases, and reports whether each is detected and blamed correctly."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.case import Case
from bitproof.harness.changes import Changes
from bitproof.harness.cli.app import Expression
from bitproof.harness.cli.arguments import CaseFiles, CaseNames, ReportDir, case_words, chosen_cases
from bitproof.harness.cli.completion import names_in_catalogue
from bitproof.harness.cli.declare import command, takes
from bitproof.harness.errors import UsageError
from bitproof.harness.options import RunOptions
from bitproof.harness.settings import to_argv

DEFAULT_CASES = (
    "moe_seq",
    "transformer_batch",
    "experts_seq_sight",
    "blocks_batch_sight",
    "blocks_batch_offload",
    "blocks_batch_bucketed_float32",
    "tp_ep_shared",
    "tp_chunked_shared",
    "tp_chunked_sp",
    "pipeline_1f1b",
    "pipeline_shared",
    "pipeline_shared_float32",
    "pipeline_reductions_once",
    "pipeline_zero_bubble",
    "pipeline_zbv",
    "experts_seq_world4",
    "blocks_batch_folded",
    "blocks_batch_pieces",
    "blocks_batch_listed",
    "experts_seq_dense_traffic",
    "joint_experts_seq_overlap",
    "tp_chunked_sp_async",
    "fsdp_observed",
    "hsdp_observed",
    "ep_observed",
    "resume_observed",
    "uneven_halves",
    "ring_two",
    "schedules_gpipe",
)
"""The cases used if none is selected. Each fault goes into the first case that should detect it."""


WORLD_SIZE = 4
"""The ranks on which a case of `DEFAULT_CASES` runs if it has more, and neither tensor ranks nor stages.

Each of its groups then has two ranks or more, and a run takes half the time.
"""

_OPTIONS = ("candidate", "reference", "steps", "world_size", "observe", "device", "collectives", "timeout", "verify")
_USUAL = {"steps": 2, "timeout": 120.0}
_SAYS = {"steps": "Take N steps in each run.", "timeout": "Time limit of a fault."}


@command(
    "faults",
    "bitproof faults --list",
    "bitproof faults -k moe_seq --fault chunk-1-uses-chunk-0s-positions",
    brief="Plant faults in cases, and count which are caught.",
    statuses=("every fault is caught, and no rewrite that keeps all bits is", "otherwise", "a run fails"),
)
@takes(Changes, RunOptions, only=_OPTIONS, usual=_USUAL, says=_SAYS)
def faults_command(
    names: CaseNames = None,
    expression: Expression = None,
    case_files: CaseFiles = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            "--fault",
            metavar="NAME",
            help="Plant only this fault or family. Repeatable.",
            autocompletion=names_in_catalogue,
        ),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the catalogue, and run nothing.")] = False,
    report_dir: ReportDir = Path("reports"),
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Write the table into this page, between its marks.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN_DIR", help="Continue an earlier call, from its run directory."),
    ] = None,
    *,
    changes: Changes,
    options: RunOptions,
) -> None:
    """Plant every fault of the catalogue in cases; report which are caught, and whether each is found in its place."""
    from bitproof.harness.powers.mutants.command import Page, choose, faults, list_faults

    entries = choose(fault or ())
    if page is not None and fault:
        raise UsageError(
            "--page writes the table of all faults", expected="no --fault beside it", found=", ".join(fault)
        )
    if list_only:
        print("\n".join(list_faults(entries)))
        return
    cases = chosen_cases(expression, case_files, changes, DEFAULT_CASES, names)
    if not (expression or names or case_files or changes.world_size):
        cases = [on_fewer_ranks(case) for case in cases]
    chosen = [part for name in fault or () for part in ("--fault", name)]
    selection = ["-k", expression] if expression else names or case_words(case_files)
    call = shlex.join(["bitproof", "faults", *selection, *chosen, *to_argv(changes, options, usual=_USUAL)])
    options = replace(options, kept_graphs=None, control="never")
    into = None if page is None else Page(page, call)
    everywhere = expression is not None or bool(names)
    replay = [*to_argv(changes, options), *case_words(case_files, names)]
    status = faults(cases, entries, options, report_dir, everywhere=everywhere, replay=replay, page=into, resume=resume)
    raise typer.Exit(status)


def on_fewer_ranks(case: Case) -> Case:
    """Return the case on `WORLD_SIZE` ranks if it has a multiple of them, and neither tensor ranks nor stages."""
    mesh = case.parallelism
    is_plain = mesh.tp == mesh.pp == 1 and mesh.world_size % WORLD_SIZE == 0
    return replace(case, parallelism=replace(mesh, world_size=WORLD_SIZE)) if is_plain else case
