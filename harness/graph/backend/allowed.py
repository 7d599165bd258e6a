"""The operators that a graph from elsewhere may call: what a training step computes with, and nothing else.

What is not here is refused by its name, before it is looked up; a step that needs it can still be traced where it runs.
"""

from __future__ import annotations

from bitproof.harness.operators import overloads

ALLOWED = overloads(lambda row: row.allowed)
"""Operators by the names that `plain` writes. Python's functions on sizes are `plain`'s own."""
