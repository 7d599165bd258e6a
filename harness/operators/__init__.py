"""A table of facts about operators that their schemas do not state, with a row per operator. Imports no torch.

- `row`: the columns of the table.
- `rows`, `aten`: the table. The certificate checker has a copy.
- `questions`: functions that query the table.
- `happens_before`: finds calls that use the same memory in no defined order.
- `crossings`: finds deadlocks between ranks.
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
