"""`bitproof prove`: a static proof that two systems' steps have equal bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.case import Case
from bitproof.harness.case.case_file import read_case
from bitproof.harness.case.select import asks_for
from bitproof.harness.cli.app import Expression, app, selected_cases
from bitproof.harness.cli.options import Candidate, EarlyGradAccumulation, ExtraPass, Reference, WorldSize, make_changes
from bitproof.harness.commands.run import change_case
from bitproof.harness.errors import UsageError


@app.command("prove")
def prove_command(
    expression: Expression = None,
    case_file: Annotated[
        Path | None, typer.Option("--case", metavar="FILE", help="Prove the case in this JSON file, instead of -k.")
    ] = None,
    candidate: Candidate = None,
    reference: Reference = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="PASS", help='Take the candidate\'s graph as this pass leaves it; "" for the traced one.'),
    ] = None,
    extra_pass: ExtraPass = None,
    early_grad_accumulation: EarlyGradAccumulation = False,
    flavor: Annotated[str | None, typer.Option(help="Another size of the model, such as debugmodel.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Another number of layers.")] = None,
    world_size: WorldSize = None,
    precompiled: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take the candidate's graph from this precompiled step.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each case's certificate into a folder of this one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_table: Annotated[
        bool, typer.Option("--table", help="Print a table in Markdown, a row a case with its outputs' answers counted.")
    ] = False,
) -> None:
    """Prove, without running a rank, that a case's systems compute equal bits for every input."""
    if case_file is not None and expression is not None:
        raise UsageError("-k and --case both say what to prove", expected="one of them", found=f"-k {expression!r}")
    if as_json and as_table:
        raise UsageError("--json and --table are two ways to print", expected="one of them", found="both")
    changes = make_changes(
        reference=reference,
        candidate=candidate,
        world_size=world_size,
        early_grad_accumulation=early_grad_accumulation,
    )
    selected = selected_cases(expression) if case_file is None else [read_case(case_file)]
    cases = [_resized(change_case(case, changes), flavor, layers, until) for case in selected]
    from bitproof.harness.commands.prove import prove

    asked = case_file is not None or asks_for(expression)
    status = prove(
        cases,
        tuple(extra_pass or ()),
        asked=asked,
        as_json=as_json,
        as_table=as_table,
        folder=certificate,
        precompiled=precompiled,
    )
    raise typer.Exit(status)


def _resized(case: Case, flavor: str | None, layers: int | None, until: str | None) -> Case:
    model = replace(case.model, flavor=case.model.flavor if flavor is None else flavor)
    if layers is not None:
        model = replace(model, layers=layers)
    pipeline = case.pipeline if until is None else replace(case.pipeline, until=until)
    return replace(case, model=model, pipeline=pipeline)
