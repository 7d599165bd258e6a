"""What is known of operators that their schemas do not say: one table, a row an operator. Loads no torch.

`row` says what the columns mean, `rows` is the table, `questions` how it is asked; `happens_before` says which calls
are ordered and which are not. The checker of certificates has a copy of its own, which a test compares.
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
