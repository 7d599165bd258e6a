"""The fault catalogue: `CATALOGUE` has all entries by name. Loads no torch."""

from __future__ import annotations

from bitproof.harness.disturb.entry import Entry
from bitproof.harness.disturb.faults import (
    chunking,
    collectives,
    equivalent,
    equivalent_sums,
    fsdp,
    gradients,
    hygiene,
    loops,
    memory,
    micro_batches,
    moe,
    numerics,
    optimizer,
    ranks,
    tensor,
)

FAMILIES = (
    chunking,
    gradients,
    moe,
    collectives,
    numerics,
    memory,
    fsdp,
    optimizer,
    hygiene,
    ranks,
    tensor,
    micro_batches,
    loops,
    equivalent,
)


def collect() -> dict[str, Entry]:
    rows: dict[str, Entry] = {}
    modules = (*FAMILIES, equivalent_sums)
    for row in (value for module in modules for value in vars(module).values() if isinstance(value, Entry)):
        assert row.name not in rows, f"two rows are named {row.name}"
        rows[row.name] = row
    return rows


CATALOGUE = collect()
