"""Find extensions of bitproof in installed distributions by their entry points, without loading code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitproof.harness.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SYSTEMS, CASES, CHECKS = "bitproof.systems", "bitproof.cases", "bitproof.checks"
"""The groups of entry points: functions that make systems; cases, or functions that return cases; classes of checks."""


def entry_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group, by name. Raises UsageError if two distributions use the same name."""
    from importlib import metadata

    found: dict[str, EntryPoint] = {}
    for entry in metadata.entry_points(group=group):
        if entry.name in found:
            raise UsageError(
                f"two distributions claim the name {entry.name} in entry-point group {group}",
                expected="a name of its own for every entry point",
                found=f"{describe(found[entry.name])} and {describe(entry)}",
                fix="uninstall one of the two, or rename its entry point",
            )
        found[entry.name] = entry
    return found


def describe(entry: EntryPoint) -> str:
    """Return the object and the distribution of an entry point, as in "my.module:factory of my-package 1.0"."""
    return f"{entry.value} of {distribution_of(entry)}"


def distribution_of(entry: EntryPoint) -> str:
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def load(entry: EntryPoint) -> Any:
    """Load the object of an entry point. Raises UsageError, which names the distribution, if its code raises any
    error."""
    try:
        return entry.load()
    # The distribution's code may raise anything.
    except Exception as error:
        raise UsageError(
            f"entry point {entry.name} of {distribution_of(entry)} cannot be loaded",
            found=f"{type(error).__name__}: {error}",
            where=f"{entry.group}, {entry.value}",
            fix="mend or uninstall that distribution",
        ) from error
