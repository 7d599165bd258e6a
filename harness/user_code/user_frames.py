"""Run a user's code in a rank, so that it can neither hide errors that bitproof raises in it, nor end the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bitproof.harness.errors import UsageError
from bitproof.harness.within_user_code import refusals_raised


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Context in which a user's code runs. `what` names the code in errors, such as "system t.py:make".

    Raises the first error of bitproof's hooks, even if the code caught it. Raises UsageError if the code calls
    `sys.exit`.
    """
    # Around the handler below: an error of a hook comes first, even if the code caught it and then exits.
    with refusals_raised():
        try:
            yield
        except SystemExit as error:
            raise UsageError(
                f"{what} called sys.exit({error.code!r})",
                expected="code that returns: a rank records what it leaves",
                found=f"sys.argv was {sys.argv!r}; what it printed is in the rank's log",
                fix="let argparse parse no words (`parser.parse_args([])`), or take settings from the case's `options`",
            ) from error
