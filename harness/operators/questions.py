"""Queries of the table of operators: a row by name, or all operators with a property."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import fields

from bitproof.harness.operators.row import Operator, Uninitialized
from bitproof.harness.operators.rows import ROWS

COMMUNICATES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"})
"""The namespaces of operators that communicate between ranks."""


@functools.lru_cache(maxsize=1 << 12)
def known(name: str) -> Operator:
    """Return the row of an operator such as `aten.empty_like`.

    An operator without a row has its namespace's row, such as `c10d.*`, or else a row without facts.
    """
    if (row := ROWS.get(name)) is not None:
        return row
    return ROWS.get(f"{name.partition('.')[0]}.*") or Operator(name=name)


@functools.cache
def named(name: str) -> Operator:
    """Return a single row for all operators of this name, in any namespace, such as `empty_like`.

    Each column has the first value that any of their rows states.
    """
    rows = [row for row in ROWS.values() if row.name.partition(".")[2] == name]
    # All columns but the first, the name.
    columns = [field.name for field in fields(Operator)][1:]
    # Reversed, so that the value of the first row that states the column is kept.
    stated = {column: getattr(row, column) for column in columns for row in reversed(rows) if _is_stated(row, column)}
    return Operator(name=name, **stated)


def names(holds: Callable[[Operator], object]) -> frozenset[str]:
    """Return the names of the operators whose rows satisfy `holds`, without namespace and overload: "empty_like"."""
    return frozenset(row.name.partition(".")[2] for row in ROWS.values() if holds(row))


def overloads(column: Callable[[Operator], str | Iterable[str] | None]) -> frozenset[str]:
    """Return the full names, such as "aten.add.Tensor", of the overloads that a column of the table lists.

    `column` returns a row's value in that column: an overload, several, or None.
    """
    found = set()
    for row in ROWS.values():
        value = column(row)
        found |= {row.overload(name) for name in ((value,) if isinstance(value, str) else value or ())}
    return frozenset(found)


def names_of_uninitialized(*parts: Uninitialized) -> frozenset[str]:
    """Return the names of the operators that leave any of these parts of their result uninitialized.

    The names have no namespace and no overload.
    """
    return names(lambda row: row.uninitialized in parts)


def _is_stated(row: Operator, column: str) -> bool:
    value = getattr(row, column)
    # 0 is a value: `factors_from` may be the index 0.
    return value is not None and value is not False and value != ()
