"""The operators that a graph from a file may call: those of training steps, and no others.

Any other operator is refused by name, before a look-up. A step that needs it can still be traced on the ranks.
"""

from __future__ import annotations

from bitproof.harness.operators import overloads

ALLOWED = overloads(lambda row: row.allowed)
"""The allowed operators, by the names that `plain` writes. Python functions on sizes are listed in `plain` itself."""
