"""Facts about operators that their schemas do not state, in a table with a row per operator. Imports no torch.

`row` documents the columns, `rows` is the table, `questions` are its queries; `happens_before` decides which calls are
ordered. The checker of certificates has its own copy of the table; a test compares the two.
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
