"""Modules of powers that the core uses if an option or a launcher asks for them, loaded only then.

For example, `run --baseline` keeps the values that `power_module("baselines.drifted").values_to_keep` names.
"""

from __future__ import annotations

import importlib
from typing import Any


def power_module(name: str) -> Any:
    """The module `name` of `harness.powers`, such as "baselines.drifted"."""
    return importlib.import_module(f"bitproof.harness.powers.{name}")
