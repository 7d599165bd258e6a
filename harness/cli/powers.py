"""The commands of powers, each loaded only when it is called, or when help lists all commands."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

COMMANDS = {
    "prove": "bitproof.harness.powers.proofs.cli",
    "check-certificate": "bitproof.harness.powers.proofs.cli",
    "sensitivity": "bitproof.harness.powers.sensitivity.cli",
}
"""The module that declares each command."""


def load_commands(words: Sequence[str]) -> None:
    """Declare the command that these words call; all commands if the words call none by name, e.g. `--help`."""
    called = words[0] if words else ""
    for name in [called] if called in COMMANDS else COMMANDS if called.startswith("-") or not called else ():
        importlib.import_module(COMMANDS[name])
