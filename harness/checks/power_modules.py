"""Import modules of powers (optional abilities of bitproof) for the core, only if an option needs the power.

For example, only `run -j` imports the module of `power_module("side_by_side.concurrency")`.
"""

from __future__ import annotations

import importlib
from typing import Any


def power_module(name: str) -> Any:
    """Import the module `name` of `harness.powers`, such as "two_layouts.across", and return it."""
    return importlib.import_module(f"bitproof.harness.powers.{name}")
