"""`bitproof list`: print the cases, or the systems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from bitproof.harness.case import Case
from bitproof.harness.changes import Changes
from bitproof.harness.cli.app import Expression
from bitproof.harness.cli.arguments import CaseFiles, CaseNames, chosen_cases
from bitproof.harness.cli.declare import DONE, command
from bitproof.harness.systems.registry import NAMED, registered
from bitproof.harness.user_code.plugins import describe

WIDTH = 80


@command("list", "bitproof list -k moe", "bitproof list --systems --json", statuses=DONE)
def list_command(
    names: CaseNames = None,
    expression: Expression = None,
    case_files: CaseFiles = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    systems: Annotated[bool, typer.Option("--systems", help="List the named systems instead.")] = False,
) -> None:
    """List the cases, or the named systems."""
    rows: list[dict[str, str | int]] = (
        [
            {"name": name, "source": "built in" if name in NAMED else describe(registered()[name])}
            for name in (*NAMED, *registered())
        ]
        if systems
        else [_describe(case) for case in chosen_cases(expression, case_files, Changes(), names=names)]
    )
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not systems:
        print("\n".join(_by_family(rows)))
        return
    # Systems as a table: each column is as wide as its widest cell.
    columns = list(rows[0])
    lines = [columns, *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _by_family(rows: list[dict[str, str | int]]) -> Iterator[str]:
    width = max(len(str(row["name"])) for row in rows)
    family = None
    for row in rows:
        # Cases of a family are neighbours in the list.
        if row["family"] != family:
            family = row["family"]
            yield f"{family}, ranks x steps:"
        size = f"{row['world_size']}x{row['steps']}"
        # Only the names of factories: their paths would fill the line.
        systems = " ".join(str(row[side]).rpartition(":")[2] for side in ("reference", "candidate"))
        line = f"  {row['name']:<{width}}  {row['expected']:<9}  {size:<5}  {systems}"
        yield line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _describe(case: Case) -> dict[str, str | int]:
    return {
        "name": case.name,
        "family": case.family,
        "expected": case.expected,
        "reference": case.reference,
        "candidate": case.candidate,
        "world_size": case.parallelism.world_size,
        "steps": case.steps,
    }
