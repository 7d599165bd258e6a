"""`bitproof precompile`: trace a case's step before runs, once for all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.changes import Changes
from bitproof.harness.cli.arguments import CaseName, find_case
from bitproof.harness.cli.declare import DONE, command, takes
from bitproof.harness.options import RunOptions

_OPTIONS = ("candidate", "world_size", "early_grad_accumulation", "device", "inject", "timeout")
_SAYS = {
    "inject": "Plant a fault in both ranks' traces, to see that the comparison finds it.",
    "timeout": "Time limit.",
}


@command(
    "precompile",
    "bitproof precompile moe_seq --out step",
    "bitproof run -k moe_seq --precompiled step",
    brief="Make a case's step ahead of a run.",
    statuses=DONE,
)
@takes(Changes, RunOptions, only=_OPTIONS, says=_SAYS)
def precompile_command(
    case: CaseName,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The step's directory; an older step in it is replaced.")],
    *,
    changes: Changes,
    options: RunOptions,
) -> None:
    """Make a case's step in one process without ranks, for `run --precompiled`."""
    from bitproof.harness.commands.precompile import precompile

    raise typer.Exit(precompile(find_case(case, changes), out, options))
