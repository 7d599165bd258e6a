"""All rows of the catalogue, by name, one module a family. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.disturb.faults import (
    chunking,
    collectives,
    equivalent,
    fsdp,
    gradients,
    hygiene,
    memory,
    moe,
    numerics,
    optimizer,
    ranks,
    tensor,
)
from bitproof.harness.disturb.faults.entry import Entry

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
    equivalent,
)


def collect() -> dict[str, Entry]:
    """Every row, in its family's order; each has the family of the module that it stands in."""
    rows: dict[str, Entry] = {}
    for family in FAMILIES:
        for row in family.ENTRIES:
            assert row.name not in rows, f"two rows are named {row.name}"
            rows[row.name] = replace(row, family=family.FAMILY)
    return rows


CATALOGUE = collect()
