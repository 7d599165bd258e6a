"""The result of a check of GPUs. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a check."""

    name: str
    is_ok: bool
    found: str
