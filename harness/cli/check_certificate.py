"""`bitproof check-certificate`: is what `prove --certificate` wrote a proof?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.app import app


@app.command("check-certificate")
def check_certificate_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A certificate's folder, or one that holds several.")],
) -> None:
    """Check certificates, with nothing of torch and nothing of the prover."""
    from bitproof.harness.commands.check_certificate import check_certificates

    raise typer.Exit(check_certificates(folder))
