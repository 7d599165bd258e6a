"""Load the commands of powers: only the called command, or all if help or a misspelled name needs them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from bitproof.harness.cli.app import app

COMMANDS = {
    "bisect": "bitproof.harness.powers.shrink.cli",
    "shrink": "bitproof.harness.powers.shrink.cli",
    "accept": "bitproof.harness.powers.baselines.cli",
    "merge": "bitproof.harness.powers.merge.cli",
    "faults": "bitproof.harness.powers.mutants.cli",
    "prove": "bitproof.harness.powers.proofs.cli",
    "check-certificate": "bitproof.harness.powers.proofs.cli",
    "sensitivity": "bitproof.harness.powers.sensitivity.cli",
    "moved": "bitproof.harness.powers.moved.cli",
    "doctor": "bitproof.harness.powers.doctor.cli",
}
"""The module that declares each command."""


def load_commands(words: Sequence[str]) -> None:
    """Declare the command that these words call; all commands if the words call none by name.

    For example, `--help` lists them all, and `prov` is answered with "Did you mean 'prove'?".
    """
    called = words[0] if words else ""
    if called in {command.name for command in app.registered_commands}:
        return
    for name in [called] if called in COMMANDS else COMMANDS:
        importlib.import_module(COMMANDS[name])
