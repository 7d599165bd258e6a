"""`bitproof check-certificate`: is what `prove --certificate` wrote a proof?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.app import app
from bitproof.harness.cli.options import ExtraPass


@app.command("check-certificate")
def check_certificate_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A certificate's folder, or one that holds several.")],
    retrace: Annotated[
        bool, typer.Option("--retrace", help="Make both graphs anew and compare them. Needs torch, and this code.")
    ] = False,
    extra_pass: ExtraPass = None,
    precompiled: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --retrace: the precompiled step that was proved.")
    ] = None,
) -> None:
    """Check certificates, with nothing of torch and nothing of the prover; with --retrace also what they are about."""
    from bitproof.harness.commands.check_certificate import check_certificates

    extra_passes = tuple(extra_pass or ())
    raise typer.Exit(check_certificates(folder, retrace=retrace, extra_passes=extra_passes, precompiled=precompiled))
