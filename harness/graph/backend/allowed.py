"""The operators that a graph from a file may call: only operators of training steps.

A graph with any other operator is refused. A step that needs such an operator can still be traced on the ranks.
"""

from __future__ import annotations

from bitproof.harness.operators import overloads

ALLOWED = overloads(lambda row: row.allowed)
"""The allowed operators, by the names that `graph_json` writes. Allowed Python functions on sizes are listed in
`graph_json`."""
