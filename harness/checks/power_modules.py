"""Import modules of powers (optional abilities of bitproof) for the core, only if an option needs them.

For example, only `run --baseline` imports the module of `power_module("baselines.drifted")`.
"""

from __future__ import annotations

import importlib
from typing import Any


def power_module(name: str) -> Any:
    """Import the module `name` of `harness.powers`, such as "baselines.drifted", and return it."""
    return importlib.import_module(f"bitproof.harness.powers.{name}")
