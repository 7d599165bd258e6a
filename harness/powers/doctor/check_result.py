"""The result of a GPU check, in a module that does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a GPU check: whether it passed, and its findings in words."""

    name: str
    is_ok: bool
    found: str
