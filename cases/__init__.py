"""The cases that come with bitproof, by name. One file a family."""

from __future__ import annotations

from collections.abc import Iterable

from cases import backends, chunking, unequal
from harness.case import Case
from harness.errors import CaseError


def collect(*families: Iterable[Case]) -> dict[str, Case]:
    """Cases by name, in the order given. Raises CaseError when two share a name."""
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


CASES = collect(chunking.CASES, unequal.CASES, backends.CASES)


def all_cases() -> tuple[Case, ...]:
    """Every case, in the order in which runs and lists show them."""
    return tuple(CASES.values())
