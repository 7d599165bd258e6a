"""`bitproof prove` and `bitproof check-certificate`: static proofs that two systems' steps have equal bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.case import Case
from bitproof.harness.case.select import asks_for
from bitproof.harness.changes import Changes
from bitproof.harness.cli.app import Expression
from bitproof.harness.cli.arguments import CaseFiles, chosen_cases
from bitproof.harness.cli.completion import names_of_cases
from bitproof.harness.cli.declare import command, takes
from bitproof.harness.errors import UsageError
from bitproof.harness.options import RunOptions
from bitproof.harness.settings import CHANGES, PIPELINE

_OPTIONS = (
    *("candidate", "reference", "world_size", "chunk_modules", "chunk_dim", "early_grad_accumulation"),
    *("extra_passes", "precompiled"),
)
_SAYS = {"precompiled": "Take the candidate's graph from this precompiled step."}


@command(
    "prove",
    "bitproof prove -k moe_seq",
    "bitproof prove A.pt2 B.pt2",
    brief="Prove that two programs compute equal bits.",
    statuses=("PROVED, or as its case states", "NOT PROVED, or not as its case states", "REFUSED"),
)
@takes(Changes, RunOptions, only=_OPTIONS, says=_SAYS)
def prove_command(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CASE|A.pt2 B.pt2",
            help="Cases of these names, or their JSON files; or two files that torch.export.save wrote.",
            show_default=False,
            autocompletion=names_of_cases,
        ),
    ] = None,
    expression: Expression = None,
    case_files: CaseFiles = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="PASS",
            help='Take the candidate\'s graph as this pass leaves it; "" for the traced one.',
            rich_help_panel=PIPELINE,
        ),
    ] = None,
    flavor: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Use another model size, such as debugmodel.", rich_help_panel=CHANGES),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Use N layers.", rich_help_panel=CHANGES)
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each case's certificate below this directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_table: Annotated[
        bool, typer.Option("--table", help="Print a Markdown table: a row per case, with its outputs' answers counted.")
    ] = False,
    *,
    changes: Changes,
    options: RunOptions,
) -> None:
    """Prove, without running a rank, that a case's systems compute equal bits for every input."""
    if as_json and as_table:
        raise UsageError("--json and --table are two ways to print", expected="one of them", found="both")
    words = given or []
    # A program's file may have any name; a word that is no file and has no ending of one is a case.
    are_programs = any(word.endswith(".pt2") or (Path(word).is_file() and not word.endswith(".json")) for word in words)
    if are_programs:
        # Two files have no case, so options about cases are refused, and not ignored.
        about_cases = (expression, until, flavor, layers, certificate, options.precompiled)
        others = any(x is not None for x in about_cases) or as_table or changes != Changes()
        others = others or bool(case_files) or bool(options.extra_passes)
        raise typer.Exit(_prove_files([Path(word) for word in words], others, as_json=as_json))
    chosen = chosen_cases(expression, case_files, changes, names=words)
    cases = [_resized(case, flavor, layers, until) for case in chosen]
    from bitproof.harness.powers.proofs.command import prove

    asked = bool(case_files or words) or asks_for(expression)
    status = prove(
        cases,
        options.extra_passes,
        asked=asked,
        as_json=as_json,
        as_table=as_table,
        folder=certificate,
        precompiled=options.precompiled,
    )
    raise typer.Exit(status)


def _prove_files(programs: list[Path], others: bool, *, as_json: bool) -> int:
    if len(programs) != 2:
        raise UsageError("prove compares two programs", expected="A.pt2 B.pt2", found=" ".join(map(str, programs)))
    if others:
        raise UsageError("options about cases do not fit two programs", expected="A.pt2 B.pt2, and --json at most")
    from bitproof.harness.powers.proofs.files_command import prove_files

    return prove_files(programs[0], programs[1], as_json=as_json)


def _resized(case: Case, flavor: str | None, layers: int | None, until: str | None) -> Case:
    model = replace(case.model, flavor=case.model.flavor if flavor is None else flavor)
    if layers is not None:
        model = replace(model, layers=layers)
    pipeline = case.pipeline if until is None else replace(case.pipeline, until=until)
    return replace(case, model=model, pipeline=pipeline)


@command(
    "check-certificate",
    "bitproof check-certificate certificates",
    "bitproof check-certificate DIR --retrace",
    brief="Check certificates, without torch and the prover.",
    statuses=("accepted, and every output is proved", "accepted, and an output is not claimed", "rejected"),
)
@takes(
    RunOptions,
    only=("extra_passes", "precompiled"),
    says={
        "extra_passes": "With --retrace: the proved passes of your own. Repeatable.",
        "precompiled": "With --retrace: the proved precompiled step.",
    },
)
def check_certificate_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A certificate's folder, or one that holds several.")],
    second: Annotated[
        bool, typer.Option("--second", hidden=True, help="Has no effect: the second checker is the only one.")
    ] = False,
    retrace: Annotated[
        bool, typer.Option("--retrace", help="Make both graphs again and compare them. Needs torch and the same code.")
    ] = False,
    signers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Require a signature of one of these allowed signers, in ssh-keygen's format.",
        ),
    ] = None,
    *,
    options: RunOptions,
) -> None:
    """Check certificates without torch and without the prover; with --retrace, also the graphs that they are about."""
    from bitproof.harness.powers.proofs.certificate_command import check_certificates

    passes, step = options.extra_passes, options.precompiled
    if second:
        print("--second has no effect: the checker that it asked for is now the only one", file=sys.stderr)
    found = check_certificates(folder, retrace=retrace, extra_passes=passes, precompiled=step, signers=signers)
    raise typer.Exit(found)
