"""`bitproof merge`: merges the run folders of a run's shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.arguments import ReportDir
from bitproof.harness.cli.declare import command


@command(
    "merge", "bitproof merge reports/shard1 reports/shard2", brief="Join the run directories of `run --shard` into one."
)
def merge_command(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...", help="The folders of the shards' runs, and of one run of `bitproof faults`."
        ),
    ],
    report_dir: ReportDir = Path("reports"),
) -> None:
    """Join the run directories of `run --shard` into one; a missing shard's cases are UNVERIFIED.

    The score of a run of `bitproof faults` beside them goes into the report.
    """
    from bitproof.harness.powers.merge.merge_command import merge

    raise typer.Exit(merge(run_dirs, report_dir))
