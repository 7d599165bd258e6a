"""Read a recording's environment: every fact of its manifest that can change a bit, except the code under test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitproof.harness.compare.same_case import LABELS, in_current_form
from bitproof.harness.records import OPTIMIZERS, MachineFacts, Manifest

# Fields of a manifest about the machine that change no bit, and bitproof's own version, which describes the code.
_NOT_DECISIVE = ("bitproof", "platform", "cpu_count", "sums_over_ranks")


def environment_of(manifest: Manifest) -> dict[str, Any]:
    """Return the facts of a manifest that can change a bit, without the code under test, as nested JSON values."""
    machine, passes = manifest.machine or {}, manifest.graph.passes if manifest.graph else []
    # A pass may run more than once, each time with other settings.
    settings: dict[str, list[Any]] = {}
    for entry in passes:
        settings.setdefault(entry.name, []).append(entry.settings)
    whole = ("system", "device", "backend", "shared_gpus", "environment", "determinism")
    return {name: getattr(manifest, name) for name in whole} | {
        "ranks": None if manifest.ranks is None else [_without_code(rank) for rank in manifest.ranks],
        "case": {name: value for name, value in in_current_form(manifest.case).items() if name not in LABELS},
        "machine": {name: value for name, value in machine.items() if name not in _NOT_DECISIVE} | _release_of(machine),
        "sums": "native" if manifest.collectives == "native" else None,
        "passes": [entry.name for entry in passes],
        "settings": settings,
    }


def _without_code(rank: Mapping[str, Any]) -> dict[str, Any]:
    # A file's sha256 and the settings of optimizers depend on the code under test.
    return {name: value for name, value in rank.items() if name not in ("sha256", OPTIMIZERS)}


def _release_of(machine: MachineFacts) -> dict[str, str]:
    # The suffix repeats the field `cuda`, and manifests of earlier versions lack the suffix.
    torch, cuda = machine.get("torch"), machine.get("cuda")
    if not isinstance(torch, str) or not isinstance(cuda, str):
        return {}
    return {"torch": torch.removesuffix(f"+cu{cuda.replace('.', '')}")}
