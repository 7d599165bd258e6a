"""Facts about operators that their schemas do not state, in a table with a row per operator. Imports no torch.

`row` documents the columns, `rows` has the table, and `questions` has functions that query it. `happens_before` finds
calls that use memory without an order, and `crossings` finds deadlocks. The certificate checker has its own copy of the
table; a test compares the two.
"""

from bitproof.harness.operators.questions import COMMUNICATES, known, named, names, names_of_uninitialized, overloads
from bitproof.harness.operators.row import Hides, Launch, Operator, RowFlow, Sync, Uninitialized, Wait, Work
from bitproof.harness.operators.rows import ROWS

__all__ = [
    "COMMUNICATES",
    "ROWS",
    "Hides",
    "Launch",
    "Operator",
    "RowFlow",
    "Sync",
    "Uninitialized",
    "Wait",
    "Work",
    "known",
    "named",
    "names",
    "names_of_uninitialized",
    "overloads",
]
