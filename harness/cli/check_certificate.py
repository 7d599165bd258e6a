"""`bitproof check-certificate`: check the certificates of `prove --certificate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.declare import command, takes
from bitproof.harness.options import RunOptions


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
    from bitproof.harness.commands.check_certificate import check_certificates

    passes, step = options.extra_passes, options.precompiled
    if second:
        print("--second has no effect: the checker that it asked for is now the only one", file=sys.stderr)
    found = check_certificates(folder, retrace=retrace, extra_passes=passes, precompiled=step, signers=signers)
    raise typer.Exit(found)
