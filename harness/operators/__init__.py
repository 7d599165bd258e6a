"""What is known of operators that their schemas do not say: a row an operator. Loads no torch.

`known(name)` gives a row; `flights` follows what operators launch until something waits for it.
"""

from bitproof.harness.operators.rows import (
    ROWS,
    Launch,
    Operator,
    Uninitialized,
    Wait,
    Work,
    known,
    names_of_uninitialized,
)

__all__ = ["ROWS", "Launch", "Operator", "Uninitialized", "Wait", "Work", "known", "names_of_uninitialized"]
