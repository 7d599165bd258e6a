"""The built-in cases by name. Each module has a family: cases that test the same feature.

Lists and runs begin with the built-in cases, and continue with those of installed distributions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bitproof.builtin_cases import (
    attention,
    autoplace,
    backends,
    captured,
    chunking,
    debug,
    folded,
    joint,
    loss_pieces,
    models,
    nightly,
    pipelines,
    precompiled,
    published,
    regional,
    shapes,
    tp_chunked,
    tp_ep,
    unequal,
)
from bitproof.builtin_cases.layouts import accumulation, context_parallel, optimizers, resume, trainers, two_layouts
from bitproof.builtin_cases.passes import bucketing, memory, overlap, process_groups, traffic
from bitproof.harness.case import Case
from bitproof.harness.errors import CaseError, UsageError
from bitproof.harness.user_code import plugins

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def collect(*families: Iterable[Case]) -> dict[str, Case]:
    """Return name -> case, in the order of the families. Raises CaseError if two cases share a name."""
    by_name: dict[str, Case] = {}
    for case in (case for family in families for case in family):
        if case.name in by_name:
            raise CaseError(
                f"two cases are named {case.name}",
                expected="a name of its own for every case",
                found=f"one in family {by_name[case.name].family}, one in family {case.family}",
            )
        by_name[case.name] = case
    return by_name


# The three main cases first, then one line per family.
FAMILIES = (
    chunking,
    unequal,
    models,
    tp_ep,
    tp_chunked,
    shapes,
    memory,
    process_groups,
    bucketing,
    overlap,
    traffic,
    pipelines,
    attention,
    folded,
    loss_pieces,
    backends,
    regional,
    captured,
    joint,
    two_layouts,
    resume,
    accumulation,
    context_parallel,
    optimizers,
    precompiled,
    autoplace,
    nightly,
    debug,
    published,
    trainers,
)
CASES = collect(*(family.CASES for family in FAMILIES))


def all_cases() -> tuple[Case, ...]:
    """Return every case: the built-in cases, then those of installed distributions (entry points `bitproof.cases`).

    Raises UsageError for an entry point that cannot be loaded or returns no cases, and CaseError if two cases share a
    name.
    """
    own = [_cases_of(entry) for entry in plugins.entry_points(plugins.CASES).values()]
    return tuple(collect(CASES.values(), *own).values())


def _cases_of(entry: EntryPoint) -> Iterable[Case]:
    """Load an entry point, which names a list of cases or a function that returns such a list.

    Raises UsageError if it names something else.
    """
    found = plugins.load(entry)
    found = found() if callable(found) else found
    if not isinstance(found, (list, tuple)) or not all(isinstance(case, Case) for case in found):
        raise UsageError(
            f"entry point {entry.name} of {plugins.distribution_of(entry)} is not a list of cases",
            expected="a list or a tuple of bitproof.harness.case.Case, or a function that returns one",
            found=type(found).__name__,
            where=f"{entry.group}, {entry.value}",
        )
    return found
