"""Import the modules of commands: only the module of the called command, or all modules for help and misspelled
names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from bitproof.harness.cli.app import app

CORE, POWERS = "bitproof.harness.cli", "bitproof.harness.powers"

COMMANDS = {
    "list": f"{CORE}.listing",
    "run": f"{CORE}.run",
    "localize": f"{CORE}.localize",
    "bisect": f"{POWERS}.shrink.cli",
    "shrink": f"{POWERS}.shrink.cli",
    "record": f"{CORE}.record",
    "diff": f"{CORE}.record",
    "accept": f"{POWERS}.baselines.cli",
    "precompile": f"{CORE}.precompile",
    "report": f"{CORE}.report",
    "merge": f"{POWERS}.merge.cli",
    "faults": f"{POWERS}.mutants.cli",
    "prove": f"{POWERS}.proofs.cli",
    "check-certificate": f"{POWERS}.proofs.cli",
    "sensitivity": f"{POWERS}.sensitivity.cli",
    "moved": f"{POWERS}.moved.cli",
    "doctor": f"{POWERS}.doctor.cli",
}
"""Maps each command to the module that declares it, in the order of `bitproof --help`."""


def load_commands(words: Sequence[str]) -> None:
    """Declare the command that these words call; if they call none, declare all commands."""
    # All are needed for `--help`, and for a suggestion: `prov` is answered with "Did you mean 'prove'?".
    called = words[0] if words else ""
    for name in [called] if called in COMMANDS else COMMANDS:
        importlib.import_module(COMMANDS[name])
    # Typer lists commands in the order of their declaration, which depends on the imports.
    order = list(COMMANDS)
    app.registered_commands.sort(key=lambda command: order.index(command.name or ""))
